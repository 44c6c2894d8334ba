"""RowsService over the spool, and the SessionService of later releases: RPC to domain and back."""

from __future__ import annotations

import sys
import zlib
from collections.abc import AsyncIterator

import grpc

from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.common.errors import OffsetOutOfRange
from slipstream.common.frames import encode_header, iter_joined_frames
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
        buffers: list[bytes] = []
        parts: list[rows_pb2.RowsPart] = []
        crc32 = 0
        for ref in request.refs:
            rows = self._spool.get(ref.key)
            if rows is None:
                parts.append(rows_pb2.RowsPart(missing=True))
                continue
            buffers.append(rows.data)
            crc32 = zlib.crc32(rows.data, crc32)
            parts.append(rows_pb2.RowsPart(size_bytes=len(rows.data), first_position=rows.first_position))
        size_bytes = sum(len(buffer) for buffer in buffers)
        if request.offset_bytes > size_bytes:
            raise OffsetOutOfRange(
                f"offset_bytes {request.offset_bytes} is beyond {size_bytes}",
                field="offset_bytes",
                size_bytes=size_bytes,
            )
        yield encode_header(rows_pb2.RowsHeader(parts=parts, size_bytes=size_bytes, crc32=crc32))
        for frame in iter_joined_frames(buffers, request.offset_bytes):
            yield frame

    async def ReleaseRows(
        self, request: rows_pb2.ReleaseRowsRequest, context: grpc.aio.ServicerContext
    ) -> rows_pb2.ReleaseRowsResponse:
        return rows_pb2.ReleaseRowsResponse(released_count=sum(self._spool.release(key) for key in request.keys))
