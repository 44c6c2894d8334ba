"""Rows of holders that accept the call and then say nothing, as a process does that stands still."""

from __future__ import annotations

import asyncio
import errno
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ServiceConfig
from slipstream.common.errors import Draining
from slipstream.common.frames import encode_header, iter_frames
from slipstream.common.runtime import build_server
from slipstream.trainer.fetch import MAX_ATTEMPTS, RowsClient, ref_id

DATA = bytes(range(64))
SILENCE_S = 2.0
TOTAL_S = 60.0
"""Far from what a silence costs on a busy machine."""
FOR_GOOD_S = 3600.0


class Holder(rows_pb2_grpc.RowsServiceServicer):
    """Sends a byte a frame, with a pause before each; stands still for good before one of them."""

    def __init__(self, pause_s: float, stops_at: int | None) -> None:
        self._pause_s = pause_s
        self._stops_at = stops_at

    async def FetchRows(self, request: rows_pb2.FetchRowsRequest, context: object) -> AsyncIterator[bytes]:
        part = rows_pb2.RowsPart(size_bytes=len(DATA))
        yield encode_header(rows_pb2.RowsHeader(parts=[part], size_bytes=len(DATA), crc32=zlib.crc32(DATA)))
        for at in range(request.offset_bytes, len(DATA)):
            await asyncio.sleep(FOR_GOOD_S if at == self._stops_at else self._pause_s)
            for frame in iter_frames([DATA[at : at + 1]]):
                yield frame


class Restarting(Holder):
    """Is not there for so many calls."""

    def __init__(self, refusals: int, error: Exception) -> None:
        super().__init__(0.0, None)
        self.refusals = refusals
        self._error = error

    async def FetchRows(self, request: rows_pb2.FetchRowsRequest, context: object) -> AsyncIterator[bytes]:
        if self.refusals:
            self.refusals -= 1
            raise self._error
        async for frame in super().FetchRows(request, context):
            yield frame


@asynccontextmanager
async def served(*holders: Holder) -> AsyncIterator[list[str]]:
    servers, addresses = [], []
    for holder in holders:
        add = rows_pb2_grpc.add_RowsServiceServicer_to_server
        server, port = build_server(ServiceConfig(), [(add, holder, "slipstream.api.rollout.v1.RowsService")])
        await server.start()
        servers.append(server)
        addresses.append(f"127.0.0.1:{port}")
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(grace=None)


def ref(holder: str, row_shape: tuple[int, ...]) -> types_pb2.RowsRef:
    return types_pb2.RowsRef(holder=holder, key="k", dtype="uint8", row_shape=row_shape, size_bytes=len(DATA))


async def fetch(refs: list[types_pb2.RowsRef], total_s: float = TOTAL_S) -> tuple[dict[str, bytes], float, list[str]]:
    """What came of each holder, the seconds that it took, and why each that is away is."""
    client = RowsClient(lambda address: open_channel(address, Access()), total_s, SILENCE_S)
    started_s = time.monotonic()
    try:
        with capture_logs() as lines:
            parts = await client.fetch(refs, memoryview(bytearray(len(refs) * len(DATA))))
    finally:
        await client.close()
    found = {each.holder: bytes(parts[ref_id(each)].data) for each in refs if ref_id(each) in parts}
    away = [f"{line['holder']} {line['detail']}" for line in lines if line["event"] == "rows_holder_away"]
    return found, time.monotonic() - started_s, away


@pytest.mark.parametrize("stops_at", [0, 40])
async def test_a_silent_worker_costs_its_routes_after_the_bound_of_its_silence_and_nobody_else_s(stops_at):
    async with served(Holder(0.0, stops_at), Holder(1.5 * SILENCE_S / len(DATA), None)) as (stopped, slow):
        found, took_s, away = await fetch([ref(stopped, (2, 2)), ref(slow, (2, 2))])
    assert found == {slow: DATA}  # it took longer than a silence in all, and was never silent so long
    assert SILENCE_S < took_s < TOTAL_S / 2
    assert away == [f"{stopped} it was silent for 2 s"]


@pytest.mark.parametrize(
    "error",
    [Draining("its next process does not listen yet"), OSError(errno.EMFILE, "Too many open files")],
    ids=["drains", "files"],
)
async def test_a_runner_that_is_started_again_or_may_open_no_more_files_is_waited_for(error):
    runner = Restarting(MAX_ATTEMPTS + 2, error)
    async with served(runner) as (address,):
        found, _, away = await fetch([ref(address, ())])
    assert (found, away, runner.refusals) == ({address: DATA}, [], 0)


async def test_tokens_are_waited_for_beyond_that_as_nothing_can_take_their_place():
    async with served(Holder(0.0, 40)) as (stopped,):
        found, took_s, away = await fetch([ref(stopped, ())], total_s=2 * SILENCE_S)
    assert not found
    assert took_s >= 2 * SILENCE_S
    assert away == [f"{stopped} it did not send all in 4 s"]
