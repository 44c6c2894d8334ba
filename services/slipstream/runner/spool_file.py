"""The file of one attempt at a group: records, each with its checksums, only ever appended.

A record is a head of 28 bytes, what it is as JSON, and its bytes. The head holds the lengths of both, the CRC-32 of
each, and the CRC-32 of itself. What a crash leaves is a record cut short at the end: it is left out and reported. One
whose bytes changed since is of no use to anyone and is left out, too; where the head itself did, so is all behind it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.common.crc import crc32

_HEAD = struct.Struct("<4sIQIII")
_MARK = b"SLR1"
_MAX_META_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """Where a record lies, and what it is."""

    meta: dict[str, Any]
    offset_bytes: int
    """Of its bytes, in the file."""
    size_bytes: int
    crc32: int


@dataclass(slots=True)
class Scan:
    """What a file holds, as far as heads tell: the bytes themselves are checked when they are read."""

    records: list[Record] = field(default_factory=list[Record])
    end_bytes: int = 0
    """Of the last whole record: what is beyond is torn or damaged."""
    torn_bytes: int = 0
    damaged_count: int = 0
    """Records, at least, of which nothing can be said any more."""


def encode(meta: Mapping[str, object], data: bytes) -> list[bytes]:
    """A record as it is written."""
    body = json.dumps(meta, separators=(",", ":")).encode()
    head = _HEAD.pack(_MARK, len(body), len(data), crc32(body), crc32(data), 0)[:-4]
    return [head + struct.pack("<I", crc32(head)), body, data]


def write(descriptor: int, parts: Sequence[bytes]) -> int:
    """Append to a file, all or nothing; returns the bytes. Raises `OSError`, having taken back what was written."""
    before = os.fstat(descriptor).st_size
    data = memoryview(b"".join(parts))
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise
    return written


def scan(path: Path) -> Scan:
    """Read the heads of a file. Raises `OSError`."""
    found = Scan()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(descriptor).st_size
        for record in _records(descriptor, size_bytes, found):
            found.records.append(record)
    finally:
        os.close(descriptor)
    return found


def _records(descriptor: int, size_bytes: int, found: Scan) -> Iterator[Record]:
    while (at := found.end_bytes) < size_bytes:
        head = os.pread(descriptor, _HEAD.size, at)
        if len(head) < _HEAD.size:
            found.torn_bytes = size_bytes - at
            return
        mark, meta_bytes, data_bytes, meta_crc, data_crc, head_crc = _HEAD.unpack(head)
        if mark != _MARK or head_crc != crc32(head[:-4]) or meta_bytes > _MAX_META_BYTES:
            found.damaged_count += 1
            return
        start = at + _HEAD.size + meta_bytes
        if start + data_bytes > size_bytes:
            found.torn_bytes = size_bytes - at
            return
        found.end_bytes = start + data_bytes
        body = os.pread(descriptor, meta_bytes, at + _HEAD.size)
        if crc32(body) != meta_crc:
            found.damaged_count += 1
            continue
        yield Record(json.loads(body), start, data_bytes, data_crc)


def read(descriptor: int, record: Record) -> bytes | None:
    """The bytes of a record; None if they are no longer those that were written."""
    try:
        data = os.pread(descriptor, record.size_bytes, record.offset_bytes)
    except OSError:
        return None
    return data if len(data) == record.size_bytes and crc32(data) == record.crc32 else None
