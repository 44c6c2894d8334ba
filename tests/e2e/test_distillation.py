"""Runs without rewards, taught by what another one ended with, through a teacher worker."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from run_process import DEADLINE_S, RETRIES

from slipstream_client import Client, Session

pytestmark = pytest.mark.timeout(590, func_only=False)

STEPS = 3


def taught_by(teacher: Path) -> tuple[str, ...]:
    return (
        *("--trainer.loss.type", "distillation", "--trainer.loss.teacher", str(teacher)),
        *("--teacher.replicas", "1", "--orchestrator.min-reward-std", "0"),
    )


def check_judged(run: Any) -> None:
    """All that trained was judged, token by token."""
    gaps = [record["teacher_kl"] for record in run.metrics("step")]
    assert gaps
    assert all(math.isfinite(gap) and gap for gap in gaps)
    trained = [rollout for rollout in run.rollouts() if rollout["purpose"] == "training"]
    assert trained
    assert all(len(rollout["teacher_logprobs_base64"]) == len(rollout["logprobs_base64"]) for rollout in trained)
    assert all(record["logps_unknown"] == 0 for record in run.metrics("step"))


def test_a_teacher_worker_judges_what_is_trained_on(finished, launch):
    teacher = finished.bounded.path / "checkpoints" / "final"
    run = launch("student", *taught_by(teacher), "--orchestrator.total-steps", str(STEPS))
    assert run.end() == 0, run.output
    assert len(run.metrics("step")) == STEPS
    check_judged(run)


def say(session: Session) -> None:
    with openai.OpenAI(base_url=session.base_url, api_key=session.key, max_retries=RETRIES) as client:
        messages: Any = [{"role": "user", "content": "say something"}]
        client.chat.completions.create(model="any", messages=messages, max_tokens=12)


def test_what_outside_agents_said_is_judged_even_if_the_teacher_was_away_when_they_ended(finished, launch):
    teacher = finished.bounded.path / "checkpoints" / "final"
    run = launch(
        "taught-agents",
        *taught_by(teacher),
        *("--gateway.enabled", "true", "--orchestrator.sessions.only", "true", "--launcher.restart", "on_failure"),
        *("--orchestrator.groups-per-step", "1", "--orchestrator.total-steps", "9"),
        *("--orchestrator.total-positions", "1"),
    )
    run.wait_up()
    with Client.of_run(run.path) as client:
        sessions = [client.open_session(group_key="both", group_size=2, timeout_s=DEADLINE_S) for _ in range(2)]
        for session in sessions:
            say(session)
        os.kill(run.pid("teacher-1"), signal.SIGKILL)
        for session in sessions:
            client.close_session(session.session_id, 0.0)
    assert run.end() == 0, run.output
    assert {rollout["environment"] for rollout in run.rollouts()} == {"session"}
    check_judged(run)
