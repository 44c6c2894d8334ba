"""Bulk bytes over gRPC: a codec for stream messages of one form, encoded by hand.

    message XResponse { oneof frame { bytes data = 1; XHeader header = 2; } }

One header comes first, then data frames of at most 1 MiB, contiguous from the offset asked for. Python
protobuf copies a bytes field several times; here a frame is a tag, a varint and one copy. The bytes on
the wire are those of protobuf, so a peer that uses the generated class sees no difference.

Server, sending: yield `encode_header(header)` and then each of `iter_frames(buffers, offset)` from the
servicer's async generator (`runtime` lets bytes pass as they are). Server, receiving: mark the handler
`@raw_requests` and iterate `read_header` and `iter_data`. Client: `raw_unary_stream`, `raw_stream_unary`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from slipstream.common.errors import FrameInvalid
from slipstream.common.validation import validate

FRAME_BYTES = 1024 * 1024
_DATA_TAG = b"\x0a"  # field 1, length-delimited
_HEADER_TAG = b"\x12"  # field 2, length-delimited

Buffer = bytes | bytearray | memoryview
HeaderT = TypeVar("HeaderT", bound=Message)
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


def encode_data(*data: Buffer) -> bytes:
    """The message that holds `data`, its pieces joined. One copy."""
    return b"".join((_DATA_TAG, _varint(sum(map(len, data))), *data))


def encode_header(header: Message | bytes) -> bytes:
    """The message that holds `header`."""
    body = header if isinstance(header, bytes) else header.SerializeToString()
    return b"".join((_HEADER_TAG, _varint(len(body)), body))


def decode(message: Buffer) -> tuple[bytes | None, memoryview | None]:
    """(header bytes, None) or (None, a view of the data). An empty message is (None, None).

    As in protobuf, the last member of the oneof wins, repeated headers merge and unknown fields are skipped.
    """
    view = memoryview(message)
    header: bytes | None = None
    data: memoryview | None = None
    position, end = 0, len(view)
    while position < end:
        tag, position = _read_varint(view, position)
        if tag in (10, 18):
            size, position = _read_varint(view, position)
            if position + size > end:
                raise FrameInvalid("a frame is cut short", size_bytes=size, held_bytes=end - position)
            body = view[position : position + size]
            header, data = (None, body) if tag == 10 else ((header or b"") + bytes(body), None)
            position += size
        else:
            if tag < 8:
                raise FrameInvalid("a frame holds a field of number 0")
            position = _skip(view, position, tag)
    return header, data


def iter_frames(buffers: Iterable[Buffer], offset: int = 0, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Cut `buffers`, taken as one string of bytes, into encoded data frames, from byte `offset` on.

    A frame never spans two buffers, so nothing is copied to join them.
    """
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        start = min(offset, len(view))
        offset -= start
        for at in range(start, len(view), frame_bytes):
            yield encode_data(view[at : at + frame_bytes])


def iter_joined_frames(buffers: Iterable[Buffer], offset: int = 0, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Like `iter_frames`, for many small buffers: a frame holds as many as fit, joined when it is asked for."""
    pending: list[memoryview] = []
    held = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
        start = min(offset, len(view))
        offset -= start
        view = view[start:]
        while held + len(view) >= frame_bytes:
            pending.append(view[: frame_bytes - held])
            yield encode_data(*pending)
            view, pending, held = view[frame_bytes - held :], [], 0
        if len(view):
            pending.append(view)
            held += len(view)
    if held:
        yield encode_data(*pending)


async def read_header(messages: AsyncIterator[bytes], header_class: type[HeaderT]) -> HeaderT:
    """The first message of a raw stream, which must be a header; its rules are checked."""
    async for message in messages:
        body, _ = decode(message)
        if body is None:
            break
        try:
            header = header_class.FromString(body)
        except DecodeError as error:
            raise FrameInvalid(f"the header is not a {header_class.DESCRIPTOR.name}") from error
        validate(header)
        return header
    raise FrameInvalid("a stream must begin with its header")


async def iter_data(messages: AsyncIterator[bytes]) -> AsyncIterator[memoryview]:
    """The data of the messages after the header."""
    async for message in messages:
        header, data = decode(message)
        if header is not None:
            raise FrameInvalid("a stream has one header")
        if data is not None:
            yield data


async def skip_rest(messages: AsyncIterator[bytes], timeout_s: float) -> None:
    """Read what a client still sends, before its call is refused.

    grpc's asyncio client loses the status of a call that ends while it sends: it sees an internal error instead.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            async for _ in messages:
                continue


async def read_all(messages: AsyncIterator[bytes], size_bytes: int) -> bytearray:
    """The data frames joined into one buffer of exactly `size_bytes`."""
    out = bytearray(size_bytes)
    held = 0
    async for data in iter_data(messages):
        if held + len(data) > size_bytes:
            raise FrameInvalid("more bytes than announced", size_bytes=size_bytes)
        out[held : held + len(data)] = data
        held += len(data)
    if held != size_bytes:
        raise FrameInvalid("fewer bytes than announced", size_bytes=size_bytes, held_bytes=held)
    return out


def raw_requests(handler: HandlerT) -> HandlerT:
    """Mark a client-streaming handler: it gets undecoded messages (`bytes`) from its request iterator."""
    handler.raw_requests = True  # type: ignore[attr-defined]
    return handler


def raw_unary_stream(channel: Any, method: str) -> Any:
    """A call whose responses come undecoded. `method` is "/package.Service/Method"."""
    return channel.unary_stream(method, request_serializer=_serialize, response_deserializer=None)


def raw_stream_unary(channel: Any, method: str, response_class: type[Message]) -> Any:
    """A call whose request messages are sent as the bytes they are."""
    return channel.stream_unary(method, request_serializer=None, response_deserializer=response_class.FromString)


def raw_responses(call: grpc.aio.UnaryStreamCall[Any, bytes]) -> AsyncIterator[bytes]:
    """The one iterator of a call's messages: `async for` twice over a call would start over."""
    return call.__aiter__()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(view) and shift < 70:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise FrameInvalid("a frame holds a broken varint")


def _skip(view: memoryview, position: int, tag: int) -> int:
    """Position after a field this codec does not know."""
    kind = tag & 7
    if kind == 0:
        return _read_varint(view, position)[1]
    if kind == 1:
        size = 8
    elif kind == 5:
        size = 4
    elif kind == 2:
        size, position = _read_varint(view, position)
    else:
        raise FrameInvalid("a frame holds an unknown wire type", wire_type=kind)
    if position + size > len(view):
        raise FrameInvalid("a frame is cut short", size_bytes=size)
    return position + size
