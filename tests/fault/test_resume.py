"""A trainer that is killed in a run goes on from its checkpoint, and the run ends as if nothing had been."""

from __future__ import annotations

import os
import signal

import pytest
from run_process import gated_after, terminal_outcomes

pytestmark = pytest.mark.timeout(540, func_only=False)

STEPS = 8


def test_a_killed_trainer_goes_on_from_its_checkpoint_with_the_same_losses(launch, tmp_path):
    gate = tmp_path / "gate"
    run = launch(
        "run",
        *("--orchestrator.total-steps", str(STEPS), "--launcher.restart", "on_failure"),
        *("--trainer.checkpoint.interval-steps", "5"),
        options=gated_after(7, gate),
    )
    run.wait_step(7)
    run.wait_until((run.path / "checkpoints" / "1.5" / "COMPLETE").exists)
    os.kill(run.pid("trainer"), signal.SIGKILL)
    gate.touch()
    assert run.end() == 0, run.output
    restored = run.metrics("restored")
    assert [(record["incarnation"], record["step"]) for record in restored] == [(2, 5)], run.output
    steps = {record["step"]: record for record in run.metrics("step")}
    assert sorted(steps) == list(range(1, STEPS + 1))
    again = {record["step"]: record for record in run.metrics("retrained")}
    assert list(again) == [6, 7]
    for step, record in again.items():
        assert (record["loss"], record["grad_norm"]) == (steps[step]["loss"], steps[step]["grad_norm"])
        assert (record["sequences_lost"], record["routes_unknown_fraction"]) == (0.0, 0.0)
    assert terminal_outcomes(run.journal()) == {1}
    assert [record["step"] for record in run.journal() if record["kind"] == "trained"] == list(range(1, STEPS + 1))
    assert (run.path / "checkpoints" / "final" / "model.safetensors").exists()
    assert run.left_after() == []
