"""Spans that the orchestrator writes of rollouts: how long they ran, waited and trained, and what became of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_run import VirtualRun

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import tracing
from slipstream.common.timeline import TimelineFile
from slipstream.orchestrator.traces import GroupTraces

VERSION = types_pb2.PolicyVersion(incarnation=1, step=3)


@pytest.fixture
def spans(tmp_path: Path) -> Iterator[Any]:
    """Reads what a process that traces everything has written."""
    path = tmp_path / "timeline" / "orchestrator.jsonl"
    tracing.use(tracing.Tracer("virtual", 1.0, TimelineFile(path)))
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    tracing.use(tracing.Tracer("", 0.0))


def assigned(count: int) -> runner_pb2.GroupAssignment:
    return runner_pb2.GroupAssignment(
        group_id="train-4", attempt=2, sample_count=count, dispatch_version=VERSION, environment="good"
    )


def test_each_rollout_of_an_attempt_has_a_root_that_says_what_became_of_it(spans):
    report = runner_pb2.GroupReport(
        rollouts=[runner_pb2.RolloutRecord(sample_index=2)],
        failures=[runner_pb2.RolloutFailure(sample_index=0, reason="ROLLOUT_TIMEOUT")],
    )
    traces = GroupTraces(lambda: 10.0)
    traces.ended(assigned(3), 4.0, "finished", report)
    group, *rollouts = spans()
    roots = [tracing.rollout_trace("train-4", 1, 2, index) for index in range(3)]
    assert [(each["trace"], each["span"]) for each in rollouts] == roots
    assert [each["outcome"] for each in rollouts] == ["rollout_timeout", "given_up", "finished"]
    assert [each["rollout"] for each in rollouts] == ["train-4.2.0", "train-4.2.1", "train-4.2.2"]
    assert (group["trace"], group["span"]) == tracing.group_trace("train-4", 1, 2)
    assert group["links"] == [list(root) for root in roots if root is not None]
    for each in (group, *rollouts):
        assert "parent" not in each
        assert (each["group_id"], each["attempt"], each["environment"]) == ("train-4", 2, "good")
        assert each["end_s"] - each["start_s"] == pytest.approx(6.0, abs=1e-5)
    for each in rollouts:
        assert each["links"] == [[group["trace"], group["span"]]]


def test_of_an_attempt_that_was_given_up_all_rollouts_were(spans):
    GroupTraces(lambda: 10.0).ended(assigned(2), 4.0, "aged_out")
    assert [each["outcome"] for each in spans()] == ["aged_out"] * 3


def test_each_trained_rollout_waited_and_was_trained_in_its_own_trace(spans, tmp_path):
    run = VirtualRun(tmp_path, {"good": 5.0}, step_s=3.0, groups_per_step=2, total_steps=3, max_off_policy_steps=1)
    run.run()
    run.close()
    by_rollout: dict[str, list[dict[str, Any]]] = {}
    for each in spans():
        if "rollout" in each:
            by_rollout.setdefault(each["rollout"], []).append(each)
    trained = {name: lives for name, lives in by_rollout.items() if len(lives) == 3}
    assert len(trained) == 3 * 2 * 2
    for rollout, queue, training in trained.values():
        assert [each["name"] for each in (rollout, queue, training)] == ["rollout", "queue", "training"]
        assert rollout["trace"] == queue["trace"] == training["trace"]
        assert queue["parent"] == training["parent"] == rollout["span"]
        step = tracing.step_trace(f"1.{training['step']}")
        assert (queue["step"], training["links"]) == (training["step"], [list(step or ())])
        assert training["end_s"] - training["start_s"] >= 3.0 - 1e-5
    assert len({lives[0]["trace"] for lives in by_rollout.values()}) == len(by_rollout), "siblings have traces apart"


def test_what_an_earlier_process_knew_of_waits_since_this_one_began(spans, tmp_path):
    run = VirtualRun(tmp_path, {"good": 5.0}, step_s=3.0, groups_per_step=1, total_steps=1)
    run.run()
    run.close()
    (plan,) = run.sequencer.plans.values()
    now = [100.0]
    traces = GroupTraces(lambda: now[0])
    before = len(spans())
    now[0] = 107.0
    traces.sealed(plan)
    queues = spans()[before:]
    assert [each["name"] for each in queues] == ["queue"] * 3
    assert all(each["end_s"] - each["start_s"] == pytest.approx(7.0, abs=1e-5) for each in queues)
