"""A rollout that is brought to where it was, turn by turn, is the one that was sampled."""

from __future__ import annotations

import pytest

from slipstream.api.types.v1 import types_pb2
from slipstream.runner.rollout import STOP, Rollout, Segment

SAMPLING = types_pb2.Sampling(max_new_tokens=8, stop_token_ids=[9])


def version(step: int) -> types_pb2.PolicyVersion:
    return types_pb2.PolicyVersion(incarnation=1, step=step)


def routes(key: str) -> types_pb2.RowsRef:
    return types_pb2.RowsRef(holder="w", key=key, dtype="uint8", row_shape=[1, 1])


def segment(turn: int, *steps: int) -> Segment:
    """Tokens of a turn, one a version."""
    spans = [types_pb2.VersionSpan(token_count=1, version=version(step)) for step in steps]
    ids = [10 * turn + at for at in range(len(steps))]
    return Segment(ids, [-0.5 * token for token in ids], spans, STOP, routes(f"d{turn}"))


def state(rollout: Rollout) -> dict[str, object]:
    return {name: value for name, value in vars(rollout).items() if name != "timings"}


@pytest.mark.parametrize("branched", [False, True])
def test_recalled_turns_leave_nothing_out(branched: bool) -> None:
    told = {1: [1, 2, 3], 2: [4, 5], 3: [6]}
    answers = {1: segment(1, 1, 1, 2), 2: segment(2, 2, 2), 3: segment(3, 2, 3)}

    def begun(turn: int, rollout: Rollout | None) -> Rollout:
        if rollout is None:
            return Rollout(told[turn])
        if branched and turn == 3:
            return rollout.branch(len(rollout.token_ids), told[turn])
        rollout.hear(told[turn])
        return rollout

    sampled = recalled = None
    for turn, answer in answers.items():
        sampled, recalled = begun(turn, sampled), begun(turn, recalled)
        assert state(sampled) == state(recalled)
        sampled.take(answer, routes(f"p{turn}"), SAMPLING)
        kept = type(sampled.ended_turn()).FromString(sampled.ended_turn().SerializeToString())
        recalled.recall(kept)
        assert state(sampled) == state(recalled)
    assert recalled is not None
    assert [ref.key for ref in recalled.routes] == ["p1", "d1", "p2", "d2", "p3", "d3"]
