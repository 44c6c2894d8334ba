"""A run whose decode worker is vLLM: it trains, goes on over a worker's death, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from run_process import RunProcess, described, gated_after, left_of, lives, terminal_outcomes

pytestmark = pytest.mark.timeout(590, func_only=False)

ON_VLLM = (
    *("--decode.engine.type", "vllm", "--decode.engine.block-count", "256"),
    *("--orchestrator.stall-timeout-s", "300"),
    *("--launcher.restart", "on_failure"),
)
STEPS = 12
NUMERIC_K3 = 1e-9
"""float32 on both sides, different kernels: log-probabilities differ by a few 1e-6."""


def test_a_run_on_vllm_trains_survives_the_death_of_its_worker_and_leaves_nothing(
    launch: Callable[..., RunProcess], tmp_path: Path
):
    gate = tmp_path / "gate"
    steps = ("--orchestrator.total-steps", str(STEPS), "--orchestrator.max-off-policy-steps", "1")
    run = launch("vllm", *ON_VLLM, *steps, options=gated_after(STEPS - 2, gate))
    run.wait_until(lambda: len(run.metrics("step")) >= 3)
    worker = run.pid("decode-1")
    (engine,) = psutil.Process(worker).children()
    assert len(sockets_of(worker)) == 1
    shared_memory = mapped_by(worker, engine.pid)

    os.kill(worker, signal.SIGKILL)
    assert left_of(lambda: [described(engine)] if lives(engine) else []) == [], "the engine outlived its worker"
    assert left_of(lambda: left_in_memory(shared_memory, worker, engine.pid)) == []
    died_s = time.time()
    gate.touch()
    assert run.end() == 0, run.output

    assert run.pid("decode-1") != worker
    updates = run.metrics("update")
    assert max(int(update["version"].partition(".")[2]) for update in updates) == STEPS
    assert any(step["time_s"] > died_s for step in run.metrics("step"))
    assert terminal_outcomes(run.journal()) == {1}
    assert not sockets_of(worker), "what the killed worker left, the next one removed"
    assert not sockets_of(run.pid("decode-1"))
    assert left_in_memory(shared_memory, run.pid("decode-1")) == []
    assert run.left_after() == []
    assert run.events("service_killed") == [], "all drained by themselves"
    check_figures(run)


def check_figures(run: RunProcess) -> None:
    """What the trainer says of what vLLM sampled."""
    report = run.report()
    steps = run.metrics("step")
    assert report["steps"] == STEPS
    assert report["lag_max"] <= 1
    assert steps[0]["pure_token_count"] == steps[0]["loss_tokens"] > 0, "all of them by the weights of the base model"
    assert report["pure_max_abs_diff"] < 1e-4
    assert report["mismatch_numeric"] < NUMERIC_K3
    assert report["mismatch_kl"] < 0.05
    # Routes of the worker that died went with it: they are unknown, and those that were delivered are not.
    assert report["routes_unknown_fraction"] < 0.5
    assert steps[0]["routes_unknown_fraction"] == 0.0
    assert report["replay_check_tokens"] > 0
    on, off = report["mismatch_replay_on"], report["mismatch_replay_off"]
    assert on.keys() == off.keys() >= {"all", "numeric"}
    assert on["numeric"] < NUMERIC_K3
    assert "routing replay on and off" in (run.path / "report.html").read_text()


def test_an_engine_that_is_still_starting_ends_with_the_launcher(launch: Callable[..., RunProcess]):
    run = launch("killed", *ON_VLLM)
    run.wait_until(lambda: engines_of(run))
    assert "decode-1 is up" not in run.output
    run.processes()
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    assert run.left_after() == []


def engines_of(run: RunProcess) -> list[psutil.Process]:
    """The processes that the decode worker has started so far."""
    started = [event["pid"] for event in run.events("service_started") if event["replica"] == "decode-1"]
    return [child for pid in started for child in psutil.Process(pid).children()]


def mapped_by(*pids: int) -> set[Path]:
    """Files of /dev/shm that processes use."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}


def left_in_memory(once_mapped: set[Path], *pids: int) -> list[str]:
    """Those, and any that have the number of a process in their name. Other programs have files there, too."""
    named = [path for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in pids)]
    return [str(path) for path in (*once_mapped, *named) if path.exists()]


def sockets_of(worker: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"slipstream-vllm-{worker}-*"))
