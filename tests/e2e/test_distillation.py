"""A run without rewards, taught by what another one ended with, through a teacher worker."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.timeout(300, func_only=False)

STEPS = 3


def test_a_teacher_worker_judges_what_is_trained_on(finished, launch):
    teacher = finished.bounded.path / "checkpoints" / "final"
    run = launch(
        "student",
        *("--trainer.loss.type", "distillation", "--trainer.loss.teacher", str(teacher)),
        *("--teacher.replicas", "1", "--orchestrator.min-reward-std", "0"),
        *("--orchestrator.total-steps", str(STEPS)),
    )
    assert run.end(150.0) == 0, run.output
    gaps = [record["teacher_kl"] for record in run.metrics("step")]
    assert len(gaps) == STEPS
    assert all(math.isfinite(gap) and gap for gap in gaps)
    trained = [rollout for rollout in run.rollouts() if rollout["purpose"] == "training"]
    assert trained
    assert all(len(rollout["teacher_logprobs_base64"]) == len(rollout["logprobs_base64"]) for rollout in trained)
    assert all(record["logps_unknown"] == 0 for record in run.metrics("step"))
