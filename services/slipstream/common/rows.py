"""What FetchRows answers, whoever holds the rows: one pass for the checksum, one copy a frame, nothing held twice."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable

from slipstream.api.rollout.v1 import rows_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import OffsetOutOfRange
from slipstream.common.frames import encode_header, iter_joined_frames

CHECKED_BYTES = 4 << 20
"""The checksum gives way to other tasks after so many bytes, about a millisecond."""

Held = tuple[rows_pb2.RowsPart, memoryview]
"""The bytes of one reference and what they are; the memory stays as it is while the answer is sent."""


async def answer_rows(
    request: rows_pb2.FetchRowsRequest, read: Callable[[types_pb2.RowsRef], Held]
) -> AsyncGenerator[bytes, None]:
    """The encoded messages of the answer: the header, then the bytes of all references from the offset asked for."""
    held = [read(ref) for ref in request.refs]
    size_bytes = sum(data.nbytes for _, data in held)
    if request.offset_bytes > size_bytes:
        raise OffsetOutOfRange(
            f"offset_bytes {request.offset_bytes} is beyond {size_bytes}", field="offset_bytes", size_bytes=size_bytes
        )
    crc32 = unyielded = 0
    for _, data in held:
        for at in range(0, data.nbytes, CHECKED_BYTES):
            piece = data[at : at + CHECKED_BYTES]
            crc32 = zlib.crc32(piece, crc32)
            unyielded += piece.nbytes
            if unyielded >= CHECKED_BYTES:
                unyielded = 0
                await asyncio.sleep(0)
    yield encode_header(rows_pb2.RowsHeader(parts=[part for part, _ in held], size_bytes=size_bytes, crc32=crc32))
    for frame in iter_joined_frames((data for _, data in held), request.offset_bytes):
        yield frame
