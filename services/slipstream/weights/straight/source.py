"""WeightSourceService: a rank lends what it published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import structlog

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.common.errors import Unsupported
from slipstream.common.version import PolicyVersion

if TYPE_CHECKING:  # imports torch
    from slipstream.weights.straight.lender import Lender

log = structlog.get_logger()

SERVICE = "slipstream.api.broadcast.v1.WeightSourceService"


class WeightSourceServicer(broadcast_pb2_grpc.WeightSourceServiceServicer):
    """RPC to copies and link and back."""

    def __init__(self, transport: str, lender: Callable[[], Lender]) -> None:
        """`lender`: raises what a caller is told while there is none."""
        self._transport = transport
        self._lender = lender

    async def BorrowShard(
        self, request: broadcast_pb2.BorrowShardRequest, context: grpc.aio.ServicerContext
    ) -> broadcast_pb2.BorrowShardResponse:
        if request.transport != self._transport:
            raise Unsupported(
                f"this trainer's weights.transport is {self._transport!r}, not {request.transport!r}",
                transport=self._transport,
            )
        version, lender = PolicyVersion.from_proto(request.version), self._lender()
        copy = await asyncio.to_thread(lender.copies.lend, version, request.request_id, request.ttl_ms / 1000)
        offer = await asyncio.to_thread(lender.link.offer, copy.memory, copy.size_bytes, request.reader)
        log.debug("shard_lent", policy_version=str(version), reader=request.reader, size_bytes=copy.size_bytes)
        return offer

    async def ReturnShard(
        self, request: broadcast_pb2.ReturnShardRequest, context: grpc.aio.ServicerContext
    ) -> broadcast_pb2.ReturnShardResponse:
        await asyncio.to_thread(self._lender().copies.give_back, request.request_id)
        return broadcast_pb2.ReturnShardResponse()
