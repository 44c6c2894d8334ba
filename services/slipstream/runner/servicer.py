"""RowsService over the spool, and the SessionService of later releases: RPC to domain and back."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.rows import NOTHING, Held, answer_rows, span_of
from slipstream.runner.spool import Spool

if sys.byteorder != "little":
    raise ImportError("rows are little-endian on the wire and this platform is not")


ITEM_BYTES = {"int32": 4, "float32": 4, "uint8": 1, "uint16": 2}
"""Of the element types that a reference may name."""


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
        span = span_of(ref)
        rows = self._spool.get(ref.key, ref.holder_epoch)
        row_bytes = ITEM_BYTES[ref.dtype] * math.prod(ref.row_shape)
        if rows is None or len(rows.data) % row_bytes:
            return NOTHING
        whole, first = memoryview(rows.data), rows.first_position
        data = whole
        if span is not None:
            start, end = max(span[0] - first, 0), max(span[1] - first, 0)
            data, first = whole[start * row_bytes : end * row_bytes], first + start
        if not data.nbytes:
            return NOTHING
        crc32 = rows.crc32 if data.nbytes == whole.nbytes else None
        return Held(rows_pb2.RowsPart(size_bytes=data.nbytes, first_position=first), data, crc32)

    async def ReleaseRows(
        self, request: rows_pb2.ReleaseRowsRequest, context: grpc.aio.ServicerContext
    ) -> rows_pb2.ReleaseRowsResponse:
        return rows_pb2.ReleaseRowsResponse(released_count=sum(self._spool.release(key) for key in request.keys))
