"""RowsService for expert routes: references to what the engine recorded, and the bytes by reference.

Keys on the wire are the pool's prefix and the engine's key: "p/<request_id>" at prefill, "d/<sample_id>" at decode, and
"d/<request_id>" there for a prompt that decode computed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import RoutesUnknown
from slipstream.common.rows import NOTHING, Held, answer_rows, span_of
from slipstream.engine.base import Engine
from slipstream.engine.worker import telemetry
from slipstream.engine.worker.identity import WorkerIdentity


class RowsHolder:
    """The engine's routes as rows that others refer to."""

    def __init__(self, engine: Engine, identity: WorkerIdentity) -> None:
        self._engine = engine
        self._identity = identity
        self._prefix = "p/" if identity.role == worker_pb2.WORKER_ROLE_PREFILL else "d/"

    def ref(self, engine_key: str) -> types_pb2.RowsRef | None:
        """A reference to all rows under a key, or None when there are none."""
        try:
            routes = self._engine.routes(engine_key)
        except RoutesUnknown:
            return None
        if not len(routes.rows):
            return None
        return types_pb2.RowsRef(
            holder=self._identity.address,
            holder_epoch=self._identity.epoch,
            key=self._prefix + engine_key,
            ranges=[types_pb2.RowRange(start=routes.first_position, end=routes.end)],
            dtype=routes.rows.dtype.name,
            row_shape=routes.rows.shape[1:],
            size_bytes=routes.rows.nbytes,
        )

    def read(self, ref: types_pb2.RowsRef) -> Held:
        """The rows a reference names, as far as they are held; not copied. Those of another form are not held."""
        span = span_of(ref)
        if ref.holder_epoch not in ("", self._identity.epoch) or not ref.key.startswith(self._prefix):
            return NOTHING
        try:
            routes = self._engine.routes(ref.key.removeprefix(self._prefix))
        except RoutesUnknown:
            return NOTHING
        if span is not None:
            routes = routes.between(*span)
        if not len(routes.rows) or (ref.dtype, tuple(ref.row_shape)) != (routes.rows.dtype.name, routes.rows.shape[1:]):
            return NOTHING
        part = rows_pb2.RowsPart(
            size_bytes=routes.rows.nbytes,
            first_position=routes.first_position,
            unknown_ranges=[types_pb2.RowRange(start=start, end=end) for start, end in routes.unknown_ranges],
            recomputed_from=routes.recomputed_from,
        )
        return Held(part, routes.rows.data.cast("B"), routes.crc32)

    def release(self, keys: Sequence[str], holder_epoch: str = "") -> int:
        """Drop rows; returns how many keys were held. Those of an earlier life are gone already."""
        if holder_epoch not in ("", self._identity.epoch):
            return 0
        own = (key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix))
        return sum(self._engine.release_routes(key) for key in own)


class RowsServicer(rows_pb2_grpc.RowsServiceServicer):
    """Serves RowsService over one engine's routes."""

    def __init__(self, routes: RowsHolder) -> None:
        self._routes = routes

    async def FetchRows(
        self, request: rows_pb2.FetchRowsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        size_bytes = 0

        def read(ref: types_pb2.RowsRef) -> Held:
            nonlocal size_bytes
            held = self._routes.read(ref)
            size_bytes += held.data.nbytes
            return held

        async with aclosing(answer_rows(request, read)) as messages:
            async for message in messages:
                yield message
        telemetry.rows_sent_bytes.inc(size_bytes - request.offset_bytes)

    async def ReleaseRows(
        self, request: rows_pb2.ReleaseRowsRequest, context: grpc.aio.ServicerContext
    ) -> rows_pb2.ReleaseRowsResponse:
        return rows_pb2.ReleaseRowsResponse(released_count=self._routes.release(request.keys, request.holder_epoch))
