"""What evaluations count of a rollout."""

from __future__ import annotations

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.orchestrator.evaluation import answer_of

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("cut", runner_pb2.RolloutCut.values())
@pytest.mark.parametrize(
    ("reasons", "last_turn_cut"), [([STOP], False), ([LENGTH], True), ([LENGTH, STOP], False), ([STOP, LENGTH], True)]
)
def test_a_rollout_is_truncated_by_whatever_limit_ended_it(cut, reasons, last_turn_cut):
    record = runner_pb2.RolloutRecord(
        cut=cut,
        finish_reason=reasons[0],
        further_samples=[runner_pb2.RolloutSample(finish_reason=reason) for reason in reasons[1:]],
    )
    assert answer_of(record).truncated == (last_turn_cut or cut != runner_pb2.ROLLOUT_CUT_UNSPECIFIED)
