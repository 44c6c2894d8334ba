"""Clients of streams that stop reading or sending: what the call held is free after a while, and the client is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.common import errors, handlers
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.frames import encode_data, raw_requests
from slipstream.common.runtime import Service

STALL_S = 0.8
ADD = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
FETCH = broadcast_pb2.FetchSlicesRequest(version={"incarnation": 1})
MANIFEST = broadcast_pb2.GetManifestRequest()


class Broadcaster(broadcast_pb2_grpc.BroadcastServiceServicer):
    """Sends without end, takes whatever comes, and says when a call is over."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        """Released by each stream that is sent."""
        self.taken = 0
        self.port = 0

    async def FetchSlices(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.begun.release()
        try:
            while True:
                yield encode_data(bytes(1 << 20))
        finally:
            self.ended.set()

    @raw_requests
    async def PublishShard(self, request_iterator: AsyncIterator[bytes], context: Any) -> Any:
        try:
            async for _ in request_iterator:
                self.taken += 1
        finally:
            self.ended.set()
        return broadcast_pb2.PublishShardResponse()

    async def GetManifest(self, request: Any, context: Any) -> Any:
        return broadcast_pb2.GetManifestResponse()


def as_any(channel: Any) -> Any:
    return channel


@pytest.fixture
async def served(
    make_config, monkeypatch
) -> AsyncIterator[tuple[Broadcaster, broadcast_pb2_grpc.BroadcastServiceStub]]:
    monkeypatch.setattr(handlers, "MAX_STALL_S", STALL_S)
    servicer = Broadcaster()
    service = Service(make_config(), [(ADD, servicer, "slipstream.api.broadcast.v1.BroadcastService")])
    await service.start()
    servicer.port = service.port
    async with open_channel(f"127.0.0.1:{service.port}", Access()) as channel:
        yield servicer, broadcast_pb2_grpc.BroadcastServiceStub(as_any(channel))
    await service.server.stop(None)


async def test_a_stream_that_nobody_reads_is_ended_with_a_reason(served):
    servicer, stub = served
    call = stub.FetchSlices(FETCH, timeout=60)
    started_s = time.monotonic()
    await asyncio.wait_for(servicer.ended.wait(), 60)
    assert time.monotonic() - started_s >= STALL_S
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:  # what was on its way arrives, then the reason
            pass
    error = errors.from_rpc_error(refused.value)
    assert isinstance(error, errors.StreamStalled)
    assert error.metadata["limit_s"] == str(STALL_S)


async def test_many_streams_that_nobody_reads_hold_up_no_other_caller(served, monkeypatch):
    monkeypatch.setattr(handlers, "MAX_STALL_S", 120.0)
    servicer, stub = served
    calls = [stub.FetchSlices(FETCH, timeout=120) for _ in range(20)]
    async with asyncio.timeout(60):
        for _ in calls:
            await servicer.begun.acquire()
    async with open_channel(f"127.0.0.1:{servicer.port}", Access()) as channel:
        other = broadcast_pb2_grpc.BroadcastServiceStub(as_any(channel))
        for _ in range(20):
            await other.GetManifest(MANIFEST, timeout=60)
    assert not servicer.ended.is_set(), "all of them still stand"
    for call in calls:
        call.cancel()


async def test_a_reader_that_is_slow_but_reads_is_served(served, monkeypatch):
    stall_s = 4.0  # a busy machine makes some of the pauses longer
    monkeypatch.setattr(handlers, "MAX_STALL_S", stall_s)
    _, stub = served
    call = stub.FetchSlices(FETCH, timeout=60)
    for _ in range(12):
        assert await call.read() is not grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] its stubs lack it
        await asyncio.sleep(stall_s / 8)
    call.cancel()


async def test_a_client_that_stops_sending_is_ended_with_a_reason(served):
    servicer, stub = served
    call = stub.PublishShard(None, timeout=60)
    await call.write(broadcast_pb2.PublishShardRequest(data=b"x"))
    await asyncio.wait_for(servicer.ended.wait(), 60)
    assert servicer.taken == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert isinstance(errors.from_rpc_error(refused.value), errors.StreamStalled)


async def test_a_client_that_sends_nothing_and_hangs_up_half_ends_well(served):
    servicer, stub = served
    call = stub.PublishShard(None, timeout=60)
    await call.done_writing()
    assert await call == broadcast_pb2.PublishShardResponse()
    assert servicer.taken == 0
