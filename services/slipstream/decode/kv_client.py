"""Pulls KV from prefill workers by handle, and tells them in batches what they may free.

A handle comes from whoever asks. It is followed to prefill workers of the run alone, as the run's token goes with the
call; and what it leads to says of what prompt it is, under which salt, for the engine to compare (`engine/checks.py`).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import Container
from uuid import uuid4

import grpc
import structlog

from slipstream.api.inference.v1 import prefill_pb2, prefill_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.errors import (
    DeadlineExceeded,
    FrameInvalid,
    KvMismatch,
    KvTransferFailed,
    SlipstreamError,
    Unreachable,
    from_rpc_error,
)
from slipstream.common.frames import iter_data, raw_responses, raw_unary_stream, read_header
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import FRAMES, KvHeader, KvPayload, KvReference

log = structlog.get_logger()

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 0.1
RELEASE_TIMEOUT_S = 5.0
MAX_PENDING_RELEASES = 65536
"""Beyond, KV is left to its expiry."""


class _Pull:
    """The bytes of one prompt's KV as they come."""

    def __init__(self) -> None:
        self.header: prefill_pb2.KvHeader | None = None
        self.data = bytearray()

    @property
    def done(self) -> bool:
        return self.header is not None and len(self.data) == self.header.size_bytes


class KvClient:
    """One channel a prefill worker."""

    def __init__(self, access: Access, prefill_addresses: Container[str], timeout_s: float, limit_bytes: int) -> None:
        self._prefill_addresses = prefill_addresses
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        """Most KV that a prompt of this model has."""
        self._channels = Channels(lambda address: open_channel(address, access))
        self._fetched: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        """Of a worker's address and epoch."""

    async def resolve(self, handle: prefill_pb2.KvHandle) -> KvPayload | KvReference:
        """What the engine is given: the bytes, or a lease of what its own connector takes."""
        if handle.address not in self._prefill_addresses:
            raise KvMismatch(f"{handle.address} is no prefill worker of this run: prefill_workers", field="address")
        if handle.transport in ("", FRAMES):
            return await self.fetch(handle)
        return await self.lease(handle)

    async def lease(self, handle: prefill_pb2.KvHandle) -> KvReference:
        """Ask the worker that holds it, which knows its epoch and what it freed. `release` it in the end."""
        started_s = time.monotonic()
        pull = _Pull()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._receive(handle, pull)
        except TimeoutError:
            self.release(handle)  # it may be ours without our knowing
            raise _failed(handle, f"no lease came in {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.release(handle)
            raise
        except KvMismatch:
            raise
        except SlipstreamError as error:
            raise _failed(handle, f"{error.reason}: {error.message}") from error
        header = pull.header
        assert header is not None
        return KvReference(
            transport=handle.transport,
            params=header.connector_params,
            transfer_id=handle.transfer_id,
            token_count=header.token_count,
            salt=header.salt,
            prompt_hash=header.prompt_hash,
            version=PolicyVersion.from_proto(header.version),
            oldest_version=PolicyVersion.from_proto(header.kv_oldest_version),
            lease_s=header.lease_ms / 1000 - (time.monotonic() - started_s),
            address=handle.address,
        )

    def release(self, handle: prefill_pb2.KvHandle) -> None:
        """Its KV is not needed any more."""
        fetched = self._fetched[handle.address, handle.worker_epoch]
        if len(fetched) < MAX_PENDING_RELEASES:
            fetched.append(handle.transfer_id)

    async def fetch(self, handle: prefill_pb2.KvHandle) -> KvPayload:
        """The KV that `handle` names. Ends in `timeout_s`, with `KvTransferFailed` if it did not come."""
        pull = _Pull()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._fill(handle, pull)
        except TimeoutError:
            raise _failed(handle, f"it did not come in {self._timeout_s:g} s") from None
        except KvMismatch:
            raise
        except SlipstreamError as error:
            raise _failed(handle, f"{error.reason}: {error.message}") from error
        header = pull.header
        assert header is not None
        if zlib.crc32(pull.data) != header.crc32:
            raise _failed(handle, "its CRC differs")
        self.release(handle)
        return KvPayload(
            KvHeader(
                dtype=header.dtype,
                shape=tuple(header.shape),
                token_count=header.token_count,
                salt=header.salt,
                prompt_hash=header.prompt_hash,
                version=PolicyVersion.from_proto(header.version),
                oldest_version=PolicyVersion.from_proto(header.kv_oldest_version),
            ),
            pull.data,
        )

    async def release_for_ever(self, interval_s: float) -> None:
        """Tell prefill workers what was fetched. A call that fails leaves the KV to its expiry."""
        while True:
            await asyncio.sleep(interval_s)
            await self.release_fetched()

    async def release_fetched(self) -> None:
        fetched, self._fetched = self._fetched, defaultdict(list)
        for (address, epoch), transfer_ids in fetched.items():
            request = prefill_pb2.ReleaseKvRequest(
                request_id=uuid4().hex, transfer_ids=transfer_ids, worker_epoch=epoch
            )
            try:
                stub = prefill_pb2_grpc.KvServiceStub(self._channels.get(address))
                await stub.ReleaseKv(request, timeout=RELEASE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.info("kv_release_failed", address=address, code=error.code().name)

    async def close(self) -> None:
        await self._channels.close()

    async def _fill(self, handle: prefill_pb2.KvHandle, pull: _Pull) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await self._receive(handle, pull)
            except (Unreachable, DeadlineExceeded, FrameInvalid) as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                log.info("kv_fetch_resumed", offset_bytes=len(pull.data), reason=error.reason)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _receive(self, handle: prefill_pb2.KvHandle, pull: _Pull) -> None:
        """Take what one stream gives, from where the last one ended."""
        fetch = raw_unary_stream(self._channels.get(handle.address), "/slipstream.api.inference.v1.KvService/FetchKv")
        request = prefill_pb2.FetchKvRequest(kv=handle, offset_bytes=len(pull.data))
        call = fetch(request, timeout=self._timeout_s)
        try:
            messages = raw_responses(call)
            pull.header = await read_header(messages, prefill_pb2.KvHeader)
            if pull.header.size_bytes > self._limit_bytes:
                raise KvMismatch(f"{pull.header.size_bytes} bytes are announced", field="size_bytes")
            async for data in iter_data(messages):
                if len(pull.data) + len(data) > pull.header.size_bytes:
                    raise KvMismatch(f"more than the announced {pull.header.size_bytes} bytes came", field="data")
                pull.data += data
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        if not pull.done:
            raise FrameInvalid("the stream ended early", held_bytes=len(pull.data), size_bytes=pull.header.size_bytes)


def _failed(handle: prefill_pb2.KvHandle, why: str) -> KvTransferFailed:
    return KvTransferFailed(f"KV of {handle.transfer_id} from {handle.address}: {why}", address=handle.address)
