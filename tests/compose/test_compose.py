"""compose.yaml and deploy/Dockerfile: they keep their formats, hang together, and what they say runs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from emulator import BWRAP, load, root_arguments

from slipstream.environments.tokenizer import build_tokenizer
from slipstream.models.checkpoint import save_model
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.models.registry import save_sizes

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
EMULATOR = Path(__file__).with_name("emulator.py")
STEPS = 2
# A warm-up too short to learn much, then small steps: rewards differ, and that is all that training needs.
ARGUMENTS = (
    "--orchestrator.total-steps 2 --orchestrator.groups-per-step 4 --sft.max-steps 30 --sft.decay-steps 5 "
    "--evaluation.before false --evaluation.after false"
)

SERVICES: dict[str, dict[str, Any]] = load(COMPOSE, {})["services"]
BUILT = {name: spec for name, spec in SERVICES.items() if "build" in spec}


def test_the_file_keeps_the_compose_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_every_image_is_an_extra_with_a_script_and_a_stage_that_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, spec in BUILT.items():
        service = spec["build"]["args"]["SERVICE"]
        assert (ROOT / spec["build"]["dockerfile"]).samefile(DOCKERFILE)
        assert service in project["optional-dependencies"], name
        command = spec["command"].split() if isinstance(spec["command"], str) else spec["command"]
        assert command[0] == ("slipstream" if service == "launcher" else f"slipstream-{service}")
        assert command[0] in project["scripts"]


def test_no_service_is_privileged_published_or_without_bounds():
    for name, spec in SERVICES.items():
        assert not spec.get("privileged"), name
        assert not spec.get("ports"), name
        assert spec["mem_limit"], name
        assert spec["restart"], name
        assert spec["healthcheck"], name
        assert spec["networks"] == ["slipstream"], name
        assert all(word not in str(spec).lower() for word in ("password", "token=")), name
    assert load(COMPOSE, {})["networks"]["slipstream"]["internal"] is True


def test_every_process_of_the_demo_has_a_container_at_the_address_its_peers_are_told():
    settings = tomllib.loads((ROOT / "deploy" / "compose.toml").read_text())
    beside = tomllib.loads((ROOT / "deploy" / "teacher.toml").read_text())
    endpoints = settings["endpoints"] | beside["endpoints"]
    assert [name for name, spec in SERVICES.items() if spec.get("profiles")] == ["teacher"]
    served = {f"{name}:{port}" for name, spec in BUILT.items() for port in spec.get("expose", [])}
    assert served == {*endpoints.values(), f"gateway:{settings['gateway']['http_port']}"}
    for address, replica in {address: replica for replica, address in endpoints.items()}.items():
        spec = SERVICES[address.partition(":")[0]]
        assert spec["command"][-1] == spec["environment"]["SLIPSTREAM_CONFIG"]
        assert spec["command"][-1].endswith(f"/configs/{replica}.toml")


def test_the_dockerfile_is_read_as_meant():
    stages: list[list[Any]] = []
    text: Any = io.BytesIO(DOCKERFILE.read_bytes())
    for line in DockerfileParser(fileobj=text).structure:
        if line["instruction"] == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(line)
    final = {line["instruction"]: line["value"] for line in stages[-1]}
    assert final["USER"] == "slipstream"
    assert "slipstream.common.probe" in final["HEALTHCHECK"]
    assert json.loads(final["CMD"])[-1].startswith("exec ")  # so that SIGTERM reaches the service
    assert next(line["value"] for line in stages[-1] if line["instruction"] == "ARG") == "SERVICE"
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for line in stages[0]:
        if line["instruction"] == "COPY":
            for source in line["value"].split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in kept, source


def keep_a_teacher(directory: Path) -> None:
    """What an earlier run of the demo might have ended with: a model with its tokenizer."""
    tokenizer = build_tokenizer()
    sizes = MoeConfig(vocab_size=tokenizer.get_vocab_size())
    model = build_model(sizes)
    init_weights(model, 3)
    save_model(model, directory)
    save_sizes(sizes, directory)
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.timeout(480)
def test_the_whole_stack_of_the_file_trains_and_stops(tmp_path):
    hosts = tmp_path / "hosts"
    addresses = [f"127.0.1.{number} {name}" for number, name in enumerate(SERVICES, start=1)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
    keep_a_teacher(tmp_path / "volumes" / "runs" / "demo" / "checkpoints" / "final")
    around = [BWRAP, *root_arguments(), "--unshare-net", "--die-with-parent", "--ro-bind", str(hosts), "/etc/hosts"]
    paths = ["PYTHONPATH=" + ":".join(str(ROOT / name) for name in ("services", "clients/python"))]
    command = [*around, "--", "env", *paths, sys.executable, str(EMULATOR), str(COMPOSE), str(tmp_path), str(STEPS)]
    variables = {"SLIPSTREAM_RUN": "small", "SLIPSTREAM_ARGS": ARGUMENTS, "SLIPSTREAM_OVERLAY": "@ deploy/teacher.toml"}
    command.append("teacher")
    done = subprocess.run(command, input=json.dumps(variables), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    seen = json.loads(done.stdout)
    assert seen["ports"]
    assert all(seen["ports"].values()), seen["ports"]
    assert seen["gateway"] == [401, "invalid_api_key"]
    assert seen["steps"] >= STEPS
    steps = [json.loads(line) for line in (tmp_path / "volumes/runs/small/metrics.jsonl").read_text().splitlines()]
    assert all("teacher_kl" in step for step in steps if step["kind"] == "step"), "the teacher judged what trained"
    assert all(name in seen["status"] for name in ("orchestrator", "decode-2", "trainer", "serving")), seen["status"]
    assert "away" not in seen["status"]
    assert set(seen["ended"]) == {name for name, spec in SERVICES.items() if not spec["healthcheck"].get("disable")}
    assert {code for code, _ in seen["ended"].values()} == {0}, seen["ended"]
    assert seen["report"][0] == 0, seen["report"]
    assert json.loads((tmp_path / "volumes" / "runs" / "small" / "report.json").read_text())["steps"] >= STEPS
