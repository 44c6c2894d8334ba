"""What is kept of the attempts that run equals what counting them says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.attempts import Attempt, RunningAttempts

events = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(1, 3), st.integers(1, 8)), max_size=30)


@given(events)
def test_counts_are_those_of_the_attempts_that_run_after_any_events(
    events: list[tuple[bool, int, int, int]],
) -> None:
    running = RunningAttempts()
    expected: dict[tuple[str, int], Attempt] = {}
    for begins, number, step, sample_count in events:
        assignment = runner_pb2.GroupAssignment(
            group_id=f"train-{number}",
            attempt=1,
            sample_count=sample_count,
            dispatch_version=PolicyVersion(1, step).to_proto(),
        )
        attempt = Attempt(assignment, "runner-1", 0.0)
        if begins:
            running.add(attempt)
            expected[attempt.key] = attempt
        else:
            assert running.pop(attempt.key) is expected.pop(attempt.key, None)
        assert {each.key: each for each in running} == expected
        assert len(running) == len(expected)
        assert (attempt.key in running) == (attempt.key in expected)
        assert running.get(attempt.key) is expected.get(attempt.key)
        assert running.rollout_count == sum(each.assignment.sample_count for each in expected.values())
        assert running.versions == {each.version for each in expected.values()}
