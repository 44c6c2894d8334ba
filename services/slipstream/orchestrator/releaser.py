"""Telling the holders of rows that nobody needs them any more, one call a holder and flush."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable

import grpc
import structlog

from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.channels import Channels
from slipstream.common.errors import from_rpc_error

log = structlog.get_logger()

_MAX_KEYS = 16_384


class RowsReleaser:
    """Collects keys and releases them every `interval_s`.

    A release that fails is dropped: holders bound what they keep, and a holder that is gone keeps nothing.
    """

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel], interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._keys: dict[tuple[str, str], set[str]] = defaultdict(set)
        """Of a holder and its epoch."""
        self._channels = Channels(open_channel)

    def release(self, refs: Iterable[types_pb2.RowsRef]) -> None:
        """Release these rows with the next flush."""
        for ref in refs:
            self._keys[ref.holder, ref.holder_epoch].add(ref.key)

    async def run(self) -> None:
        """Flush for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Send what was collected."""
        pending, self._keys = self._keys, defaultdict(set)
        await asyncio.gather(*(self._flush_holder(*holder, sorted(keys)) for holder, keys in pending.items()))

    async def close(self) -> None:
        """Close the channels."""
        await self._channels.close()

    async def _flush_holder(self, holder: str, epoch: str, keys: list[str]) -> None:
        stub = rows_pb2_grpc.RowsServiceStub(self._channels.get(holder))
        for start in range(0, len(keys), _MAX_KEYS):
            part = keys[start : start + _MAX_KEYS]
            request = rows_pb2.ReleaseRowsRequest(request_id=uuid.uuid4().hex, keys=part, holder_epoch=epoch)
            try:
                await stub.ReleaseRows(request, timeout=5.0)
            except grpc.aio.AioRpcError as error:
                log.debug("rows_not_released", holder=holder, key_count=len(keys), reason=from_rpc_error(error).reason)
                return
