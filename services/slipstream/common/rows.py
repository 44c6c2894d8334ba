"""What FetchRows answers, whoever holds the rows: one copy a frame, nothing held twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from slipstream.api.rollout.v1 import rows_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.crc import crc32, crc32_joined
from slipstream.common.errors import InvalidRequest, OffsetOutOfRange
from slipstream.common.frames import encode_header, iter_joined_frames

CHECKED_BYTES = 4 << 20
"""The checksum gives way to other tasks after so many bytes, about a millisecond."""
READ_AT_ONCE = 64
"""And after so many references looked up, half a millisecond."""
REFS_AT_ONCE = 16
"""And after so many references: joining their checksums takes 0.1 to 0.3 ms each."""


class Held(NamedTuple):
    """The bytes of one reference and what they are; the memory stays as it is while the answer is sent."""

    part: rows_pb2.RowsPart
    data: memoryview
    crc32: int | None = None
    """If the holder knows it already."""


def span_of(ref: types_pb2.RowsRef) -> tuple[int, int] | None:
    """The positions asked for, one after the other; None: all. Raises `InvalidRequest`."""
    if not ref.ranges:
        return None
    end = ref.ranges[0].start
    for part in ref.ranges:
        if part.start != end or part.end <= part.start:
            raise InvalidRequest(
                f"ranges of {ref.key!r} are not ascending, each beginning where the last ended", field="refs.ranges"
            )
        end = part.end
    return ref.ranges[0].start, end


NOTHING = Held(rows_pb2.RowsPart(missing=True), memoryview(b""))


async def answer_rows(
    request: rows_pb2.FetchRowsRequest, read: Callable[[types_pb2.RowsRef], Held]
) -> AsyncGenerator[bytes, None]:
    """The encoded messages of the answer: the header, then the bytes of all references from the offset asked for."""
    held: list[Held] = []
    read_bytes = 0
    for index, ref in enumerate(request.refs):
        held.append(read(ref))
        read_bytes += held[-1].data.nbytes
        if index % READ_AT_ONCE == READ_AT_ONCE - 1 or read_bytes >= CHECKED_BYTES:
            read_bytes = 0
            await asyncio.sleep(0)
    size_bytes = sum(each.data.nbytes for each in held)
    if request.offset_bytes > size_bytes:
        raise OffsetOutOfRange(
            f"offset_bytes {request.offset_bytes} is beyond {size_bytes}", field="offset_bytes", size_bytes=size_bytes
        )
    checksum = 0
    for index, each in enumerate(held):
        if index % REFS_AT_ONCE == REFS_AT_ONCE - 1:
            await asyncio.sleep(0)
        if each.crc32 is not None:
            checksum = crc32_joined(checksum, each.crc32, each.data.nbytes)
            continue
        for at in range(0, each.data.nbytes, CHECKED_BYTES):
            checksum = crc32(each.data[at : at + CHECKED_BYTES], checksum)
            if each.data.nbytes > CHECKED_BYTES:
                await asyncio.sleep(0)
    header = rows_pb2.RowsHeader(size_bytes=size_bytes, crc32=checksum)
    for first in range(0, len(held), READ_AT_ONCE):
        header.parts.extend(each.part for each in held[first : first + READ_AT_ONCE])
        await asyncio.sleep(0)
    yield encode_header(header)
    for frame in iter_joined_frames((each.data for each in held), request.offset_bytes):
        yield frame
