"""Which rows of expert routes a rollout refers to where some of what a stream delivered is dropped."""

from __future__ import annotations

import pytest

from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.runner.rollout import LENGTH, STOP, UNFINISHED, Rollout, Segment

PROMPT = [1, 2, 3, 4]
ROW_BYTES = 6
OLD, NEW = PolicyVersion(1, 1), PolicyVersion(1, 2)
SAMPLING = types_pb2.Sampling(max_new_tokens=32)


def ref(start: int, end: int) -> types_pb2.RowsRef:
    return types_pb2.RowsRef(
        holder="here",
        key="d/sample",
        ranges=[types_pb2.RowRange(start=start, end=end)] if end > start else [],
        dtype="uint8",
        row_shape=[3, 2],
        size_bytes=(end - start) * ROW_BYTES,
    )


def span(count: int, version: PolicyVersion) -> types_pb2.VersionSpan:
    return types_pb2.VersionSpan(token_count=count, version=version.to_proto(), kv_oldest_version=version.to_proto())


def segment(count: int, *spans: types_pb2.VersionSpan) -> Segment:
    """As many tokens, of which the worker has all rows."""
    first = len(PROMPT) - 1
    routes = ref(first, first + count)
    return Segment(list(range(count)), [-1.0] * count, list(spans or [span(count, NEW)]), LENGTH, routes)


def covered(rollout: Rollout) -> list[tuple[int, int, int]]:
    return [(part.start, part.end, each.size_bytes) for each in rollout.routes for part in each.ranges]


@pytest.mark.parametrize("count", [1, 5, 10])
def test_of_a_turn_that_is_ended_early_the_rows_of_its_own_tokens_are_referred_to(count):
    rollout, news = Rollout(PROMPT), segment(10)
    news.stop_at(count)
    rollout.take(news, None, SAMPLING)
    end = len(PROMPT) + count - 1
    assert covered(rollout) == [(3, end, count * ROW_BYTES)]
    assert (rollout.finish_reason, rollout.first_route_position) == (STOP, end)


def test_of_tokens_that_do_not_belong_into_it_no_row_is_taken_and_of_those_before_them_all_are():
    rollout, news = Rollout(PROMPT), segment(10, span(6, NEW), span(4, OLD))
    assert news.cut_untrusted(NEW) == 4
    rollout.take(news, None, SAMPLING)
    assert covered(rollout) == [(3, 9, 6 * ROW_BYTES)]
    assert (rollout.finish_reason, rollout.first_route_position) == (UNFINISHED, 9), "the next stream goes on from here"


def test_where_nothing_is_kept_no_row_is():
    rollout, news = Rollout(PROMPT), segment(4, span(4, OLD))
    assert news.cut_untrusted(NEW) == 4
    rollout.take(news, None, SAMPLING)
    assert (rollout.token_ids, rollout.routes, rollout.first_route_position) == (PROMPT, [], 0)


def test_what_is_whole_and_what_says_no_ranges_is_referred_to_as_it_is():
    for given in (segment(5).routes, ref(0, 0)):
        rollout, news = Rollout(PROMPT), segment(5)
        news.routes = given
        rollout.take(news, None, SAMPLING)
        assert rollout.routes == [given]
