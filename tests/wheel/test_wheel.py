"""The wheel as a stranger gets it: built from the tree and from the sdist, in an environment with nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(590)

DEADLINE_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.toml"
BUILD = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"
SERVICES = ("orchestrator", "runner", "router", "prefill", "decode", "trainer", "broadcaster", "sandbox")
NEEDED_BY_THE_CLIENT = ("grpcio", "protobuf", "typing-extensions")

FAKE = """
from slipstream_client import Client
from slipstream_client.fake import FakeServer, Script

with FakeServer(token="secret") as server:
    server.script(Script(texts=["nus"], rewards=[1.0]), environment="spelling")
    with Client.connect(server.address, token="secret") as client:
        created = client.create_rollout(environment="spelling", sample_count=2)
        ended = client.wait_rollout(created.group_id, timeout_s=20)
        print(ended.state, [sample.text for sample in ended.samples])
"""


def built(source: Path, target: Path) -> list[Path]:
    """The wheel and the sdist of a source tree, made by hatchling in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [target / name for name in done.stdout.split()[-2:]]


def run_outside(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Nothing of the repository is to be found from there."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def environment(directory: Path, *packages: str) -> Path:
    """The `bin` of a new virtual environment with these packages alone."""
    python = directory / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(directory)], check=True, timeout=DEADLINE_S)
    subprocess.run([*uv, "pip", "install", "-q", "--python", str(python), *packages], check=True, timeout=DEADLINE_S)
    return directory / "bin"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(artifacts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs are, of an environment with the wheel and its base dependencies."""
    return environment(tmp_path_factory.mktemp("base"), str(artifacts[0]))


def test_the_wheel_holds_packages_stubs_types_and_licence_and_no_tests(artifacts):
    with zipfile.ZipFile(artifacts[0]) as wheel:
        names = set(wheel.namelist())
    sources = {
        str(path.relative_to(root))
        for root in (ROOT / "services", ROOT / "clients" / "python")
        for path in root.rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert sources <= names
    for proto in (ROOT / "proto").rglob("*.proto"):
        stub = str(proto.relative_to(ROOT / "proto").with_suffix(""))
        assert {f"{stub}_pb2.py", f"{stub}_pb2.pyi", f"{stub}_pb2_grpc.py"} <= names
    assert {"buf/validate/validate_pb2.py", "slipstream/py.typed", "slipstream_client/py.typed"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"buf", "slipstream", "slipstream_client"}
    assert not [name for name in names if "test" in Path(name).name or "__pycache__" in name]


def test_the_sdist_builds_the_same_wheel(artifacts, tmp_path):
    with tarfile.open(artifacts[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    again, _ = built(tree, tmp_path)
    with zipfile.ZipFile(artifacts[0]) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_base_dependencies_run_what_needs_no_model(installed, tmp_path):
    version = run_outside(tmp_path, str(installed / "slipstream"), "--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("slipstream 0.")
    shown = run_outside(tmp_path, str(installed / "slipstream"), "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "rl @ FILE.toml" in shown.stdout
    resolved = run_outside(tmp_path, str(installed / "slipstream"), "rl", "@", str(DEMO), "--dry-run")
    assert resolved.returncode == 0, resolved.stderr
    assert 'name = "demo"' in resolved.stdout
    assert resolved.stderr.startswith("note: ")
    fields = run_outside(tmp_path, str(installed / "slipstream-router"), "--help")
    assert fields.returncode == 0, fields.stderr
    nothing = run_outside(tmp_path, str(installed / "slipstream"), "stop")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "no run is up\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["rl", "up", "sft"])
def test_a_command_that_needs_more_says_which_extra_in_one_line(installed, tmp_path, command):
    refused = run_outside(tmp_path, str(installed / "slipstream"), command, "@", str(DEMO))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(f"error: slipstream {command} needs numpy, ")
    assert refused.stderr.endswith("not installed: pip install 'slipstream[demo]'\n")
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_a_service_that_needs_more_says_which_extra_in_one_line(installed, tmp_path):
    answers = {name: run_outside(tmp_path, str(installed / f"slipstream-{name}"), "--help") for name in SERVICES}
    refused = {name for name, answer in answers.items() if answer.returncode != 0}
    needed = {**dict.fromkeys(("prefill", "decode", "trainer", "broadcaster"), "numpy"), "runner": "zstandard"}
    assert refused == needed.keys()
    for name, package in needed.items():
        wanted = f"error: slipstream-{name} needs {package}, which is not installed: pip install 'slipstream[{name}]'\n"
        assert (answers[name].returncode, answers[name].stderr) == (2, wanted)


def test_the_client_works_against_its_fake_with_grpc_and_protobuf_alone(artifacts, tmp_path_factory, tmp_path):
    bin_dir = environment(tmp_path_factory.mktemp("client"), *NEEDED_BY_THE_CLIENT)
    python = str(bin_dir / "python")
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--python", python, str(artifacts[0])],
        check=True,
        timeout=DEADLINE_S,
    )
    done = run_outside(tmp_path, python, "-W", "error", "-c", FAKE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished ['nus', 'nus']\n", "")
