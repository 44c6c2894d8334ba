"""A rank that is gone ends the step at the others, in time and by its name."""

from __future__ import annotations

import pytest

from parallel.pool import Pool
from slipstream.trainer.parallel.roll import Sign, lost_ranks

COLLECTIVE_TIMEOUT_S = 5.0
"""What the ranks of a busy machine may be apart in the step before, which all of them do."""
WAYS = [("killed", "does not answer"), ("stuck", "is stuck")]
"""To lose a rank, and what is said of it."""
SILENCE_S = 600.0
"""Before a rank would be missed for that alone; a stuck one wakes no sooner."""
SAID_WITHIN_S = 60.0
"""A busy machine's part in it."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("how", "why"), WAYS)
def test_a_lost_rank_is_named_in_time(how, why, tmp_path):
    pool = Pool(2, tmp_path)
    try:
        options = {"how": how, "path": str(tmp_path / "roll"), "silence_s": SILENCE_S}
        pool.start("interrupted", 2, collective_timeout_s=COLLECTIVE_TIMEOUT_S, **options)
        told = pool.answer(0, 2 * SAID_WITHIN_S)["answer"]
    finally:
        pool.close(grace_s=0.1)
    assert told["ranks"] == [1]
    assert told["message"] == f"rank 1 of the trainer {why}"
    assert told["after_s"] < SAID_WITHIN_S


def test_ranks_that_all_failed_equally_far_are_not_blamed():
    before, after = ({rank: Sign(5, beats + rank, failed=True) for rank in range(3)} for beats in (1, 4))
    assert lost_ranks(before, after) == ([], "failed")
    assert lost_ranks(before, after | {1: Sign(5, 5)}) == ([1], "is stuck")


def test_silence_is_blamed_before_slowness():
    before = {0: Sign(5, 1), 1: Sign(4, 1), 2: Sign(5, 1)}
    after = {0: Sign(5, 4), 1: Sign(4, 4), 2: Sign(5, 1)}
    assert lost_ranks(before, after) == ([2], "does not answer")
    assert lost_ranks(before, after | {2: Sign(5, 4)}) == ([1], "is stuck")
