"""What a person does with a run: look at it, stop it, start one service of it by hand."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from run_process import DEADLINE_S, PREFILLING, RunProcess, environment, gated_after

from slipstream.common.auth import Access, read_token
from slipstream.common.channel import open_channel
from slipstream.launcher.certs import make_certificates

pytestmark = pytest.mark.timeout(590, func_only=False)

REPLICAS = ("orchestrator", "broadcaster", "router", "sandbox", "prefill-1", "decode-1", "runner-1", "trainer")
MANY_STEPS = ("--orchestrator.total-steps", "100000")
EVERYWHERE = ("slipstream_event_loop_lag_seconds_count", "process_resident_memory_bytes", "slipstream_rpcs_total")
WORKING = (
    ("orchestrator", "slipstream_orchestrator_steps_sealed_total"),
    ("orchestrator", "slipstream_orchestrator_trained_tokens_total"),
    ("orchestrator", "slipstream_orchestrator_journal_bytes"),
    ("runner-1", "slipstream_runner_rollouts_total"),
    ("runner-1", "slipstream_runner_spool_bytes"),
    ("router", "slipstream_router_placements_total"),
    ("prefill-1", "slipstream_worker_prefilled_tokens_total"),
    ("prefill-1", "slipstream_worker_kv_sent_bytes_total"),
    ("decode-1", "slipstream_worker_decoded_tokens_total"),
    ("decode-1", "slipstream_worker_update_pause_seconds_count"),
    ("trainer", "slipstream_trainer_tokens_total"),
    ("trainer", "slipstream_trainer_policy_step"),
    ("broadcaster", "slipstream_broadcaster_stored_bytes"),
    ("broadcaster", "slipstream_broadcaster_sent_bytes_total"),
)


def test_status_shows_live_services_and_stop_and_ctrl_c_end_everything(launch):
    asked = launch("asked", *MANY_STEPS, *PREFILLING, command="up")
    interrupted = launch("interrupted", *MANY_STEPS)
    asked.wait_up()
    interrupted.wait_up()
    asked.wait_step(2)

    rows = shown_in_full(asked)
    assert "training, step" in rows["orchestrator"]
    assert f"{asked.process.pid}" == (asked.path / "launcher.lock").read_text()

    check_metrics(asked)

    interrupted.processes()
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.end() == 130, interrupted.output
    assert interrupted.left_after() == []
    assert "ended: stopped by SIGINT" in interrupted.output

    assert asked.process.poll() is None, "it goes on when a run beside it stops"
    asked.processes()
    stopped = asked.slipstream("stop", "asked")
    lost = r"no checkpoint holds the weights: the .+ trained (is|are) lost; trainer\.checkpoint\.interval_steps sets .+"
    assert stopped.returncode == 0
    assert re.fullmatch(rf"asked has stopped\n{lost}\n", stopped.stdout), stopped.stdout
    assert asked.end() == 0, "a stop that was asked for is no failure"
    assert "asked was stopped: " in asked.output
    assert re.search(rf"(?m)^{lost}$", asked.output), "the launcher says so, too"
    assert asked.report()["state"] == "stopped"
    assert asked.left_after() == []
    assert "service_killed" not in (asked.path / "launcher.jsonl").read_text(), "all drained by themselves"
    shown = asked.slipstream("status", "asked")
    assert shown.returncode == 1
    assert shown.stdout.startswith("asked was stopped at ")
    assert f"report: {Path('runs/asked/report.html')}" in shown.stdout


async def test_each_service_starts_by_hand_answers_and_drains(finished, tmp_path):
    services = {
        replica: by_hand(replica, run_with(replica, finished).path / "configs", tmp_path) for replica in REPLICAS
    }
    try:
        await asyncio.gather(
            *(
                check(address_of(name, finished), read_token(run_with(name, finished).path / "token"), one)
                for name, one in services.items()
            )
        )
        for service in services.values():
            service.send_signal(signal.SIGTERM)
        codes = {replica: await asyncio.to_thread(service.wait, DEADLINE_S) for replica, service in services.items()}
        assert codes == dict.fromkeys(REPLICAS, 0)
    finally:
        for service in services.values():
            service.kill()
            service.wait()


def by_hand(replica: str, configs: Path, directory: Path) -> subprocess.Popen[bytes]:
    """`slipstream-router @ router.toml --run-dir ...`, alone: nothing else of a run is there."""
    module = f"slipstream.{replica.partition('-')[0]}"
    for name in ("journal", "logs", "rollouts", "timeline", "versions", "model", "checkpoints"):
        (directory / name).mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", module, "@", str(configs / f"{replica}.toml"), "--run-dir", str(directory)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def address_of(replica: str, finished) -> str:
    return f"127.0.0.1:{run_with(replica, finished).setting(replica, 'listen', 'port')}"


def run_with(replica: str, finished) -> RunProcess:
    """A run that had this service; the synchronous one had no prefill pool."""
    return finished.bounded if replica == "prefill-1" else finished.synchronous


def shown_in_full(run, name: str = "") -> dict[str, str]:
    """The lines of `status` by replica, once all are there: a worker may be at an update, an answer may come late."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        shown = run.slipstream("status", name or run.path.name)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.split()[:1]}
        assert rows.keys() >= set(REPLICAS)
        versions = all(" 1." in rows[replica] for replica in ("orchestrator", "trainer", "prefill-1", "decode-1"))
        serving = all(" serving " in rows[replica] for replica in ("prefill-1", "decode-1"))
        blocks = all("blocks" in rows[replica] for replica in ("prefill-1", "decode-1"))
        if versions and serving and blocks and "away" not in shown.stdout:
            return rows
        assert time.monotonic() < deadline, shown.stdout


def check_metrics(run) -> None:
    """Every service serves its own metrics where Prometheus is told to look, and they say that the run goes on."""
    targets = json.loads((run.path / "prometheus_targets.json").read_text())
    assert {target["labels"]["replica"] for target in targets} == set(REPLICAS)
    address = {target["labels"]["replica"]: target["targets"][0] for target in targets}
    for replica in REPLICAS:
        part = {"prefill": "worker", "decode": "worker"}.get(replica.partition("-")[0], replica.partition("-")[0])
        served = scrape(address[replica])
        assert any(name.startswith(f"slipstream_{part}_") for name in served), replica
    awaited = [(replica, name) for replica in REPLICAS for name in EVERYWHERE] + list(WORKING)
    deadline = time.monotonic() + DEADLINE_S
    while awaited and time.monotonic() < deadline:
        served = {replica: scrape(address[replica]) for replica in {replica for replica, _ in awaited}}
        awaited = [(replica, name) for replica, name in awaited if not served[replica][name] > 0]
    assert not awaited


def scrape(address: str) -> Counter[str]:
    """Samples by name, labels summed up; 0 of what nothing was counted of yet."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    sums: Counter[str] = Counter()
    for family in families:
        for sample in family.samples:
            sums[sample.name] += sample.value  # pyright: ignore[reportArgumentType]
    return sums


async def check(address: str, token: str | None, service: subprocess.Popen[bytes]) -> None:
    async with open_channel(address, Access(token)) as opened:
        channel: Any = opened
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S, wait_for_ready=True)
        assert answer.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for response in reflection.ServerReflectionInfo(iter([asked])):
            names = [service.name for service in response.list_services_response.service]
            assert any(name.startswith("slipstream.api.") for name in names), names
            break
    assert service.poll() is None


def test_a_run_over_mutual_tls_finishes_and_answers_status(launch, tmp_path):
    """The certificates are named as `examples/tls.toml` names them, relative to where the command is typed."""
    make_certificates(tmp_path / "certs", [], 1)
    overlay = Path(__file__).parents[2] / "examples" / "tls.toml"
    gate = tmp_path / "gate"
    steps = ("--orchestrator.total-steps", "2")
    run = launch("secured", "@", str(overlay), *steps, *PREFILLING, options=gated_after(1, gate))
    run.wait_up()
    shown_in_full(run, "runs/secured")
    gate.touch()
    assert run.end() == 0, run.output
    logs = {path.stem: path.read_text() for path in (run.path / "logs").glob("*.log") if path.stem != "valkey"}
    assert len(logs) == 8
    assert [name for name, text in logs.items() if "mutual TLS, token" not in text] == []
