"""The reader's side: manifests from the broadcaster, bytes from those who lend them. Imports no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from uuid import uuid4

import grpc
import structlog

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.common.errors import (
    DeadlineExceeded,
    SlipstreamError,
    Unsupported,
    WeightsCorrupt,
    WeightVersionUnknown,
    from_rpc_error,
)
from slipstream.weights.manifest import Manifest, check_geometry
from slipstream.weights.straight.received import Received
from slipstream.weights.transport import GrpcWeightTransport

log = structlog.get_logger()

CALL_TIMEOUT_S = 10.0
GRACE_S = 5.0
"""Who reads ends by itself at the deadline; so much later it is given up."""

Loan = broadcast_pb2.BorrowShardResponse


class Receive(Protocol):
    """Reads what is lent, in the process that needs it."""

    async def __call__(self, manifest: Manifest, loans: Sequence[Loan], reader: str, deadline_s: float) -> Any:
        """`Received`, or tensors by name. Raises `WeightsCorrupt`, `Unreachable` or `DeadlineExceeded`."""
        ...


class StraightWeightTransport(GrpcWeightTransport):
    """What was published with its bytes, such as adapters, still comes by gRPC."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        transport: str,
        receive: Receive,
        open_channel: Callable[[str], grpc.aio.Channel],
        timeout_s: float = 60.0,
        on_fetched: Callable[[str, int, float], None] = lambda transport, size_bytes, seconds: None,
    ) -> None:
        """`on_fetched`: told of each version that came, by which transport, with its bytes and seconds."""
        super().__init__(channel, timeout_s)
        self._transport = transport
        self._read = receive
        self._open_channel = open_channel
        self._on_fetched = on_fetched
        self._reader = uuid4().hex

    async def fetch(self, manifest: Manifest) -> Any:
        began_s = time.monotonic()
        if not manifest.sources:
            tensors = await super().fetch(manifest)
            self._on_fetched("grpc", manifest.size_bytes, time.monotonic() - began_s)
            return tensors
        check_geometry(manifest.slices)
        for source in manifest.sources:
            if source.transport != self._transport:
                raise Unsupported(
                    f"{manifest.version} is published by {source.transport or 'grpc'!r}, and this worker's "
                    f"weights.transport is {self._transport!r}",
                    transport=self._transport,
                )
        try:
            received = await self._borrowed(manifest)
        except BaseException:
            self._reader = uuid4().hex  # a link on which something was lost is not used again
            raise
        self._on_fetched(self._transport, manifest.size_bytes, time.monotonic() - began_s)
        return received

    async def _borrowed(self, manifest: Manifest) -> Any:
        """Borrow from all, read, give back: what was read counts only if all loans lasted."""
        deadline_s = time.monotonic() + self._timeout_s
        name = uuid4().hex
        names = [f"{name}/{index}" for index in range(len(manifest.sources))]
        received: Any = None
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                loans = [
                    await self._borrow(manifest, source.peer, loan)
                    for source, loan in zip(manifest.sources, names, strict=True)
                ]
                received = await self._read(manifest, loans, self._reader, deadline_s)
        except TimeoutError:
            await self._give_back_quietly(manifest, names)
            raise DeadlineExceeded(f"weights {manifest.version} did not come in {self._timeout_s} s") from None
        except WeightsCorrupt as error:
            try:
                await self._give_back(manifest, names)
            except SlipstreamError as late:  # no wonder: they were being overwritten
                raise WeightVersionUnknown(late.message, version=manifest.version) from error
            raise
        except BaseException:
            await self._give_back_quietly(manifest, names)
            raise
        try:
            await self._give_back(manifest, names)
        except BaseException:
            if isinstance(received, Received):
                received.release()
            raise
        return received

    async def _borrow(self, manifest: Manifest, peer: str, name: str) -> Loan:
        request = broadcast_pb2.BorrowShardRequest(
            request_id=name,
            version=manifest.version.to_proto(),
            transport=self._transport,
            reader=self._reader,
            ttl_ms=min(int(self._timeout_s * 1000), 600_000),
        )
        return await self._call_peer(peer, "BorrowShard", request)

    async def _give_back(self, manifest: Manifest, names: Sequence[str]) -> None:
        for source, name in zip(manifest.sources, names, strict=True):
            await self._call_peer(source.peer, "ReturnShard", broadcast_pb2.ReturnShardRequest(request_id=name))

    async def _give_back_quietly(self, manifest: Manifest, names: Sequence[str]) -> None:
        """After something else went wrong, which is what is told; a loan that stays ends by itself."""
        for source, name in zip(manifest.sources, names, strict=True):
            request = broadcast_pb2.ReturnShardRequest(request_id=name)
            try:
                await self._call_peer(source.peer, "ReturnShard", request)
            except SlipstreamError as error:
                log.debug("loan_not_returned", peer=source.peer, reason=error.reason)

    async def _call_peer(self, peer: str, method: str, request: Any) -> Any:
        stub = broadcast_pb2_grpc.WeightSourceServiceStub(self._open_channel(peer))
        try:
            return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
