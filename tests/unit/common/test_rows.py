"""Answers of FetchRows: many references hold nobody up, and what they ask for is what comes."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.api.rollout.v1 import rows_pb2, runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import InvalidRequest
from slipstream.common.frames import decode
from slipstream.common.rows import READ_AT_ONCE, answer_rows
from slipstream.runner.servicer import RowsServicer
from slipstream.runner.spool import Rows, Spool

REFS = 16384
"""The most that a request may have."""
TOKENS = bytes(range(40))


def ref(
    key: str = "k", *ranges: tuple[int, int], dtype: str = "int32", shape: tuple[int, ...] = ()
) -> types_pb2.RowsRef:
    spans = [types_pb2.RowRange(start=start, end=end) for start, end in ranges]
    return types_pb2.RowsRef(holder="h", key=key, dtype=dtype, row_shape=shape, ranges=spans)


async def answer(servicer: RowsServicer, refs: list[types_pb2.RowsRef]) -> tuple[rows_pb2.RowsHeader, bytes]:
    request = rows_pb2.FetchRowsRequest(refs=refs)
    frames = [decode(message) async for message in answer_rows(request, servicer._read)]
    header = rows_pb2.RowsHeader.FromString(frames[0][0] or b"")
    return header, b"".join(bytes(data or b"") for _, data in frames[1:])


@pytest.fixture
def hold(tmp_path):
    """Makes a runner's servicer that holds these rows."""

    async def held(**rows: Rows) -> RowsServicer:
        spool = Spool(tmp_path / "spool", 1 << 30)
        await spool.keep("group", runner_pb2.GroupReport(), rows)
        return RowsServicer(spool)

    return held


async def test_a_runner_sends_the_positions_asked_for_and_nothing_of_another_form(hold):
    servicer = await hold(k=Rows(TOKENS, first_position=5))  # positions 5 to 14
    asked = [
        ref(),
        ref("k", (7, 9)),
        ref("k", (7, 8), (8, 9)),
        ref("k", (0, 6)),
        ref("k", (14, 99)),
        ref("k", (15, 20)),
        ref("k", (0, 5)),
        ref(dtype="uint8", shape=(3,)),
        ref("gone"),
    ]
    header, data = await answer(servicer, asked)
    found = [None if part.missing else (part.first_position, part.size_bytes // 4) for part in header.parts]
    assert found == [(5, 10), (7, 2), (7, 2), (5, 1), (14, 1), None, None, None, None]
    assert data == TOKENS + TOKENS[8:16] * 2 + TOKENS[:4] + TOKENS[36:]


@pytest.mark.parametrize("ranges", [[(5, 3)], [(5, 5)], [(3, 5), (6, 9)], [(3, 5), (4, 9)], [(7, 8), (3, 7)]])
async def test_ranges_that_do_not_follow_each_other_are_refused_by_name(hold, ranges):
    with pytest.raises(InvalidRequest) as refused:
        await answer(await hold(k=Rows(TOKENS)), [ref("k", *ranges)])
    assert refused.value.metadata["field"] == "refs.ranges"


async def test_as_many_references_as_a_request_may_have_do_not_hold_the_loop(hold):
    servicer = await hold(**{f"k{number}": Rows(TOKENS) for number in range(REFS)})
    refs = [ref(f"k{number}", (0, 10)) for number in range(REFS)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    header, _ = await answer(servicer, refs)
    beside.cancel()
    assert len(header.parts) == REFS
    # Looked up, and told of, a few at a time: what a turn of the loop takes does not grow with the request.
    assert turns >= 2 * REFS // READ_AT_ONCE
