"""Pulling KV from a peer that breaks, lies or dies."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from slipstream.api.inference.v1 import prefill_pb2, prefill_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.errors import KvMismatch, KvTransferFailed, Unreachable
from slipstream.common.frames import encode_data, encode_header
from slipstream.common.runtime import build_server
from slipstream.common.version import PolicyVersion
from slipstream.decode.config import DecodeConfig
from slipstream.decode.kv_client import KvClient

KV = bytes(range(256)) * 40


class Peer(prefill_pb2_grpc.KvServiceServicer):
    """A prefill worker's KvService with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.offsets: list[int] = []
        self.released: list[str] = []

    async def FetchKv(
        self, request: prefill_pb2.FetchKvRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.offsets.append(request.offset_bytes)
        version = PolicyVersion(1, 1).to_proto()
        crc = zlib.crc32(KV) ^ (self.fault == "lies")
        yield encode_header(
            prefill_pb2.KvHeader(
                dtype="float32",
                shape=[2, 2, 10, 2, 32],
                token_count=10,
                size_bytes=len(KV),
                crc32=crc,
                version=version,
                kv_oldest_version=version,
                salt="salt",
                prompt_hash=7,
            )
        )
        rest = KV[request.offset_bytes :]
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if (self.fault == "breaks once" and len(self.offsets) == 1) or self.fault == "breaks":
            yield encode_data(rest[:100])
            raise Unreachable("broken")
        if self.fault == "ends early":
            rest = rest[:100]
        yield encode_data(rest)

    async def ReleaseKv(
        self, request: prefill_pb2.ReleaseKvRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ReleaseKvResponse:
        self.released += request.transfer_ids
        return prefill_pb2.ReleaseKvResponse(released_count=len(request.transfer_ids))


@asynccontextmanager
async def pulling(make_config, fault: str, timeout_s: float = 5.0) -> AsyncIterator[tuple]:
    peer = Peer(fault)
    add = prefill_pb2_grpc.add_KvServiceServicer_to_server
    server, port = build_server(make_config(DecodeConfig), [(add, peer, "slipstream.api.inference.v1.KvService")])
    await server.start()
    address = f"127.0.0.1:{port}"
    client = KvClient(Access(), {address}, timeout_s, limit_bytes=1 << 20)
    handle = prefill_pb2.KvHandle(address=address, transfer_id="g.0", token_count=10)
    yield peer, client, handle
    await client.close()
    await server.stop(None)


async def test_a_broken_transfer_goes_on_from_its_offset_and_is_released(make_config):
    async with pulling(make_config, "breaks once") as (peer, client, handle):
        payload = await client.resolve(handle)
        assert bytes(payload.data) == KV
        assert peer.offsets == [0, 100]
        assert (payload.header.salt, payload.header.prompt_hash) == ("salt", 7)
        await client.release_fetched()
        assert peer.released == ["g.0"]


@pytest.mark.parametrize("fault", ["breaks", "ends early", "lies", "hangs"])
async def test_kv_that_does_not_come_whole_is_a_failed_transfer_in_bounded_time(make_config, fault):
    async with pulling(make_config, fault, timeout_s=1.0) as (_, client, handle):
        with pytest.raises(KvTransferFailed) as failed:
            async with asyncio.timeout(30):
                await client.resolve(handle)
        assert failed.value.metadata["address"] == handle.address


async def test_a_handle_leads_to_prefill_workers_of_the_run_and_nowhere_else(make_config):
    """The run's token goes with each call."""
    async with pulling(make_config, "none") as (peer, _, handle):
        client = KvClient(Access(), {"127.0.0.1:9"}, 1.0, limit_bytes=1 << 20)
        for transport in ("frames", "nixl"):
            handle.transport = transport
            with pytest.raises(KvMismatch) as refused:
                await client.resolve(handle)
            assert refused.value.metadata["field"] == "address"
        await client.close()
        assert not peer.offsets
