"""A first turn that `max_new_tokens` cut off is counted each time and said once for each environment."""

from __future__ import annotations

from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.runner.cut_turns import CutTurns
from slipstream.runner.rollout import LENGTH, STOP, Rollout


def assignment(environment: str) -> runner_pb2.GroupAssignment:
    return runner_pb2.GroupAssignment(environment=environment, sampling=types_pb2.Sampling(max_new_tokens=8))


def ended(reason: types_pb2.FinishReason, limit: int | None = None) -> Rollout:
    rollout = Rollout([1, 2])
    rollout.finish_reason, rollout.turn_limit_tokens = reason, limit
    return rollout


def counted(environment: str) -> float:
    return REGISTRY.get_sample_value("slipstream_runner_episodes_cut_total", {"environment": environment}) or 0.0


def test_it_is_counted_each_time_and_said_once_for_each_environment():
    cut = CutTurns()
    with capture_logs() as logs:
        for environment in ("cut-a", "cut-a", "cut-b"):
            cut.note(assignment(environment), ended(LENGTH, 100))
    assert (counted("cut-a"), counted("cut-b")) == (2, 1)
    assert [(line["event"], line["environment"], line["max_new_tokens"]) for line in logs] == [
        ("first_turn_cut", "cut-a", 8),
        ("first_turn_cut", "cut-b", 8),
    ]


def test_turns_that_ended_and_those_that_the_context_cut_are_no_news():
    cut = CutTurns()
    with capture_logs() as logs:
        cut.note(assignment("cut-c"), ended(STOP))
        cut.note(assignment("cut-c"), ended(LENGTH, 5))
    assert (counted("cut-c"), logs) == (0, [])
