"""RowsService over the spool, and the SessionService of later releases: RPC to domain and back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.rows import NOTHING, Held, answer_rows
from slipstream.runner.spool import Spool

if sys.byteorder != "little":
    raise ImportError("rows are little-endian on the wire and this platform is not")


class RowsServicer(rows_pb2_grpc.RowsServiceServicer):
    """Serves what the spool holds."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    async def FetchRows(
        self, request: rows_pb2.FetchRowsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        async with aclosing(answer_rows(request, self._read)) as messages:
            async for message in messages:
                yield message

    def _read(self, ref: types_pb2.RowsRef) -> Held:
        rows = self._spool.get(ref.key)
        if rows is None:
            return NOTHING
        part = rows_pb2.RowsPart(size_bytes=len(rows.data), first_position=rows.first_position)
        return Held(part, memoryview(rows.data))

    async def ReleaseRows(
        self, request: rows_pb2.ReleaseRowsRequest, context: grpc.aio.ServicerContext
    ) -> rows_pb2.ReleaseRowsResponse:
        return rows_pb2.ReleaseRowsResponse(released_count=sum(self._spool.release(key) for key in request.keys))
