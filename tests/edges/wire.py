"""Bytes that no protobuf library would write."""

from __future__ import annotations

import random
from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = range(6)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def length_delimited(number: int, body: bytes) -> bytes:
    return tag(number, LENGTH) + varint(len(body)) + body


def malformed(message: Message, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Variations of a valid message on the wire, named by kind."""
    body = message.SerializeToString()
    for size in (1, 7, 100, 5000):
        yield f"{size} random bytes", rng.randbytes(size)
    for _ in range(min(8, len(body))):
        end = rng.randrange(len(body))
        yield f"cut off after {end} bytes", body[:end]
    for field in message.DESCRIPTOR.fields:
        yield f"{field.name} as a varint", body + tag(field.number, VARINT) + varint(rng.getrandbits(63))
        yield f"{field.name} as bytes", body + length_delimited(field.number, rng.randbytes(9))
        yield f"{field.name} as a fixed32", body + tag(field.number, FIXED32) + rng.randbytes(4)
        yield f"{field.name} as a group", body + tag(field.number, START_GROUP) + tag(field.number, END_GROUP)
        yield f"{field.name} longer than the message", body + tag(field.number, LENGTH) + varint(2**31 - 1) + b"x"
        if field.type == FieldDescriptor.TYPE_STRING:
            yield f"{field.name} is no UTF-8", body + length_delimited(field.number, b"\xff\xfe\xc0\x80")
    yield "an unknown field", body + length_delimited(2000, b"unknown")
    yield "a megabyte of unknown fields", body + length_delimited(2000, bytes(16)) * 52_000
    yield "field number 0", body + tag(0, VARINT) + b"\x01"
    yield "a varint of 11 bytes", body + tag(2000, VARINT) + b"\xff" * 10 + b"\x01"
    yield "an end without a group", body + tag(2000, END_GROUP)
    yield "ten thousand groups in each other", body + tag(2000, START_GROUP) * 10_000
    yield "ten thousand messages in each other", body + _nested(10_000)
    yield "the message twice", body + body


def flipped(body: bytes, rng: random.Random) -> tuple[str, bytes]:
    """`body` with a few bits turned over."""
    out = bytearray(body or b"\x00")
    for _ in range(rng.randint(1, 4)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return "flipped bits", bytes(out)


def _nested(depth: int) -> bytes:
    body = b""
    for _ in range(depth):
        if len(body) > 60_000:
            break
        body = length_delimited(1, body)
    return body
