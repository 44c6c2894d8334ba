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
from slipstream.common.errors import DeadlineExceeded, Draining, Unreachable, from_rpc_error

log = structlog.get_logger()

_AWAY = (Unreachable, Draining, DeadlineExceeded)

_MAX_KEYS = 16_384
_MAX_TRIES = 60
"""Flushes in a row at which a holder may be away: a runner that is started again holds what it held."""
_MAX_HELD_BACK_KEYS = 1 << 20
"""Of all holders that are away."""


class RowsReleaser:
    """Collects keys and releases them every `interval_s`.

    A release that fails is tried again with the next flushes, as long as a holder that died may be back: a runner's
    spool is full by what nobody released. Then it is dropped.
    """

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel], interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._keys: dict[tuple[str, str], set[str]] = defaultdict(set)
        """Of a holder and its epoch."""
        self._tries: dict[tuple[str, str], int] = {}
        """Failed ones in a row, of the holders of `_keys`."""
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
        tries = self._tries.pop((holder, epoch), 0) + 1
        for start in range(0, len(keys), _MAX_KEYS):
            part = keys[start : start + _MAX_KEYS]
            request = rows_pb2.ReleaseRowsRequest(request_id=uuid.uuid4().hex, keys=part, holder_epoch=epoch)
            try:
                await stub.ReleaseRows(request, timeout=5.0)
            except grpc.aio.AioRpcError as raised:
                error = from_rpc_error(raised)
                left = keys[start:]
                again = isinstance(error, _AWAY) and tries < _MAX_TRIES and self._has_room(len(left))
                log.debug("rows_not_released", holder=holder, key_count=len(left), reason=error.reason, again=again)
                if again:
                    self._keys[holder, epoch].update(left)
                    self._tries[holder, epoch] = tries
                return

    def _has_room(self, count: int) -> bool:
        return sum(map(len, self._keys.values())) + count <= _MAX_HELD_BACK_KEYS
