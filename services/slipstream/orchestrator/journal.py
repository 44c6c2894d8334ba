"""The journal: what became of every position, append-only and checksummed, on disk before a plan is given out.

One record a line: eight hex digits of CRC-32 over the rest, a space, and a JSON object whose `n` counts records
from 0. A line cut short at the end of the file is what a crash leaves: it is cut off and reported. Anything else
that does not check out means that the file was changed: it is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.errors import JournalCorrupt


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an existing journal held."""

    records: list[dict[str, Any]]
    cut_bytes: int
    """Bytes of an unfinished record that were cut off its end."""


class Journal:
    """Appends records. `append` hands them to the kernel at once; `sync` puts them on disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.recovered = _recover(path, self._fd)
        except JournalCorrupt:
            os.close(self._fd)
            raise
        self._next = len(self.recovered.records)
        self._written = 0
        self._synced = 0
        self._sync_lock = asyncio.Lock()

    def append(self, kind: str, **fields: object) -> None:
        """Write one record; it outlives this process, but not the machine until `sync`."""
        body = json.dumps({"n": self._next, "kind": kind, **fields}, separators=(",", ":")).encode()
        line = b"%08x %b\n" % (zlib.crc32(body), body)
        written = os.write(self._fd, line)
        if written != len(line):
            # A full disk takes a part. Take it back, so that a retry does not leave it in the middle.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?")
        self._next += 1
        self._written += 1

    async def sync(self) -> None:
        """Return once every record appended before the call is on disk."""
        target = self._written
        async with self._sync_lock:
            if self._synced < target:
                reached = self._written
                await asyncio.to_thread(os.fsync, self._fd)
                self._synced = reached

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_journal(path: Path) -> Recovered:
    """Read a journal without changing it."""
    return _parse(path, path.read_bytes())


def _recover(path: Path, fd: int) -> Recovered:
    data = path.read_bytes()
    recovered = _parse(path, data)
    if recovered.cut_bytes:
        os.ftruncate(fd, len(data) - recovered.cut_bytes)
        os.fsync(fd)
    return recovered


def _parse(path: Path, data: bytes) -> Recovered:
    *lines, tail = data.split(b"\n")
    records = [_record(path, number, line) for number, line in enumerate(lines)]
    return Recovered(records, len(tail))


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    digits, body = line[:8], line[9:]
    if digits != b"%08x" % zlib.crc32(body) or line[8:9] != b" ":
        raise JournalCorrupt(f"{path}: record {number} does not match its checksum", path=str(path), record=number)
    record = json.loads(body)
    if record.get("n") != number:
        raise JournalCorrupt(f"{path}: record {number} is missing", path=str(path), record=number)
    return record
