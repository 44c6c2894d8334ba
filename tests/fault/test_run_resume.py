"""A run whose orchestrator is killed, or all of it, goes on from its journal and its checkpoints."""

from __future__ import annotations

import os
import signal

import pytest
from run_process import RunProcess, gated_after

from slipstream.launcher.session import ASKED_TO_STOP
from slipstream.orchestrator.journal_check import main

pytestmark = pytest.mark.timeout(580, func_only=False)

OPTIONS = ("--trainer.checkpoint.interval-steps", "2", "--launcher.restart", "on_failure")


def finished_once(run: RunProcess, step_count: int) -> None:
    """The run came to its end, and kept its promise on the way."""
    assert main([str(run.path)]) == 0, run.output
    trained = [record["step"] for record in run.journal() if record["kind"] == "trained"]
    assert trained == list(range(1, step_count + 1))
    ended = [record for record in run.journal() if record["kind"] == "run_ended"]
    assert [record["state"] for record in ended] == ["finished"]
    assert (run.path / "checkpoints" / "final" / "model.safetensors").exists()
    assert run.left_after() == []


def test_a_killed_orchestrator_goes_on_from_its_journal(launch, tmp_path):
    gate = tmp_path / "gate"
    run = launch("run", "--orchestrator.total-steps", "14", *OPTIONS, options=gated_after(12, gate))
    for kills, step in enumerate((2, 4), start=1):
        run.wait_step(step)
        os.kill(run.pid("orchestrator"), signal.SIGKILL)
        run.wait_until(lambda kills=kills: len(run.metrics("resumed")) == kills)
    gate.touch()
    assert run.end() == 0, run.output
    finished_once(run, 14)
    assert not run.metrics("retrained"), "the trainer lived on"
    assert "orchestrator died (killed by SIGKILL) and is started again; restart 2 of 5" in run.output


def test_a_run_that_was_killed_whole_and_then_stopped_goes_on_to_its_end(launch, tmp_path):
    gate = tmp_path / "gate"
    run = launch("run", "--orchestrator.total-steps", "14", *OPTIONS, options=gated_after(3, gate))
    run.wait_step(3)
    run.wait_until((run.path / "checkpoints" / "1.2" / "COMPLETE").exists)
    run.processes()
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.left_after() == [], "what belongs to a run dies with its launcher"
    again = launch("run", resume=True)
    again.wait_until(lambda: again.metrics("restored"))
    os.kill(again.process.pid, ASKED_TO_STOP)
    assert again.end() == 0, again.output
    gate.touch()
    assert "run run: going on from step 2 of 14, that of its last checkpoint" in again.output
    moved = again.path.rename(again.path.with_name("moved"))
    last = launch("moved", resume=True)
    assert last.end() == 0, last.output
    assert not again.path.exists(), "it goes on where it is, not where it began"
    assert last.path == moved
    finished_once(last, 14)
    assert [record["incarnation"] for record in last.metrics("restored")] == [2, 3]
    refused = last.slipstream("rl", "--resume", "moved")
    assert refused.returncode == 2
    assert "has ended for good" in refused.stderr
