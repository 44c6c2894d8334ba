"""The journal: what became of every position, append-only and checksummed, on disk before a plan is given out.

One record a line: eight hex digits of CRC-32 over the rest, a space, and a JSON object whose `n` counts records
from 0 and whose `time_s` tells when it was appended, in Unix seconds. A line cut short at the end of the file is what
a crash leaves: it is cut off and reported. Anything else that does not check out means that the file was changed: it
is refused.

Records that find no room on the disk wait in memory, in order, and `sync` says so. A file that is
long enough becomes a segment, `journal-<n of its first record>.jsonl`, and the next file begins with a summary of all
that came before it (`summary.py`); while that is written out, in a thread, records wait in memory, too. Beyond the
bound the oldest segments go, as soon as every position they speak of has ended, and the summary that stands for them is
on disk.

The next file is made as `journal.new`, and takes the name of the one before once that has its own. Killed in between, a
process leaves `journal.new` and no `journal.jsonl`: readers take the one for the other, and the next process names it.
A journal whose newest file is missing otherwise is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from slipstream.common.disk import no_room, sync_directory
from slipstream.common.errors import DiskFull, JournalCorrupt
from slipstream.orchestrator.journal_text import large_line_of, line_of

log = structlog.get_logger()

SEGMENTS = 8
"""Parts that the bound is divided into."""


@dataclass(slots=True)
class Recovered:
    """What an existing journal held."""

    records: list[dict[str, Any]]
    cut_bytes: int
    """Bytes of an unfinished record that were cut off its end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of earlier records."""

    path: Path
    size_bytes: int
    last_position: int


class Summarizes(Protocol):
    """Follows the records, and sums them up."""

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in what was appended."""
        ...

    def fields(self) -> dict[str, Any] | None:
        """What a summary says; None where there can be none."""
        ...


class Journal:
    """Appends records. `append` hands them to the kernel at once, if there is room; `sync` puts them on disk."""

    def __init__(self, path: Path, limit_bytes: int = 0, frontier: Callable[[], int] = lambda: 0) -> None:
        """`limit_bytes`: 0 means no bound. `frontier`: every position below it has ended."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.frontier = frontier
        self.summarizer: Summarizes | None = None
        """Set before the first record is appended; without one, no segment has a summary."""
        self._deferred: deque[tuple[float, str, dict[str, object]]] | None = None
        """What was appended while a summary is made, which must know nothing of it; None while none is."""
        self._head_bytes = 0
        """Size of the summary that the file begins with."""
        self._limit_bytes = limit_bytes
        _finish_switch(path)
        self._fd = _open(path)
        self._segments: deque[Segment] = deque()
        try:
            self.recovered = self._recover()
        except JournalCorrupt:
            os.close(self._fd)
            raise
        self._size_bytes = self._synced_bytes = os.fstat(self._fd).st_size
        self._appended = 0
        self._synced = 0
        self._waiting: deque[bytes] = deque()
        self._unsynced: deque[bytes] = deque()
        self._sync_lock = asyncio.Lock()
        self.waiting_bytes = 0
        """Bytes of records that wait for room on the disk."""

    def _recover(self) -> Recovered:
        """Read what earlier processes wrote, all of it, and cut what a crash left at its end."""
        records: list[dict[str, Any]] = []
        *older, path = segments(self.path)
        for segment in older:
            part = _parse(segment, segment.read_bytes(), _number_after(records))
            if part.cut_bytes:
                raise JournalCorrupt(f"{segment}: its last line is cut short", path=str(segment))
            self._segments.append(Segment(segment, segment.stat().st_size, _last_position(part.records)))
            records += part.records
        data = path.read_bytes()
        part = _parse(path, data, _number_after(records))
        if part.cut_bytes:
            os.ftruncate(self._fd, len(data) - part.cut_bytes)
            os.fsync(self._fd)
        self._next = _number_after(records + part.records) or 0
        self._first = self._next - len(part.records)
        self._last_position = _last_position(part.records)
        if part.records and part.records[0]["kind"] == "summary":
            self._head_bytes = data.index(b"\n") + 1
        return Recovered(records + part.records, part.cut_bytes)

    def take_recovered(self) -> list[dict[str, Any]]:
        """What earlier processes wrote, once: it may be large, and is not kept any longer."""
        records, self.recovered.records = self.recovered.records, []
        return records

    @property
    def stuck(self) -> bool:
        """Whether records wait for room."""
        return bool(self._waiting)

    def append(self, kind: str, **fields: object) -> None:
        """Add one record; once written it outlives this process, but not the machine until `sync`.

        It is written at once, unless the disk is full or a summary is being made.
        """
        if self._deferred is not None:
            self._deferred.append((time.time(), kind, fields))
            return
        if self._first == self._next > 0:  # killed between two segments
            summary = self._sum_up()
            self._append_head(line_of(self._record("summary", summary)) if summary else b"")
        self._append(time.time(), kind, fields)

    def _append(self, time_s: float, kind: str, fields: Mapping[str, object]) -> None:
        record = self._record(kind, fields, time_s)
        self._last_position = max(self._last_position, _last_position([record]))
        self._append_line(line_of(record))
        if self.summarizer is not None:
            self.summarizer.take(record)

    def _record(self, kind: str, fields: Mapping[str, object], time_s: float | None = None) -> dict[str, Any]:
        return {"n": self._next, "kind": kind, "time_s": round(time_s or time.time(), 4), **fields}

    def _sum_up(self) -> dict[str, Any] | None:
        return {} if self.summarizer is None else self.summarizer.fields()

    def _append_head(self, line: bytes) -> None:
        if line:
            self._append_line(line)
            self._head_bytes = len(line)

    def _append_line(self, line: bytes) -> None:
        self._next += 1
        self._appended += 1
        self._waiting.append(line)
        self.waiting_bytes += len(line)
        self.flush()

    def flush(self) -> bool:
        """Hand waiting records to the kernel; False while the disk has no room."""
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                if not no_room(error):
                    raise
                return False
            if written != len(line):  # a full disk takes a part: take it back
                os.ftruncate(self._fd, self._size_bytes)
                return False
            self._size_bytes += written
            self.waiting_bytes -= written
            self._unsynced.append(self._waiting.popleft())
        return True

    def check_room(self, buffer_bytes: int) -> None:
        """Raise `DiskFull` where more than this waits for room: what others ask for is not to fill memory meanwhile."""
        if self.waiting_bytes > buffer_bytes:
            raise DiskFull(
                f"the journal finds no room, and {self.waiting_bytes} bytes of it wait "
                "(orchestrator.journal_buffer_bytes)",
                path=self.path,
                name="orchestrator.journal_buffer_bytes",
                limit=buffer_bytes,
            )

    async def sync(self) -> None:
        """Return once every record appended before the call is on disk.

        Raises:
            DiskFull: there is no room; the records wait for the next call.
        """
        async with self._sync_lock:  # a summary may be made under it, and what was appended meanwhile is appended then
            if self._synced < self._appended and not (self.flush() and await self._sync_written()):
                raise DiskFull(f"the disk of {self.path} is full", path=self.path)
            if self._due():
                await self._begin_next()

    async def settle(self) -> None:
        """`sync`, as far as there is room: on a full disk the run pauses, and the records wait in memory, in order."""
        try:
            await asyncio.shield(self.sync())
        except DiskFull as error:
            log.warning("journal_not_synced", detail=error.message)

    async def _sync_written(self) -> bool:
        count, size_bytes = len(self._unsynced), self._size_bytes
        try:
            await asyncio.to_thread(os.fsync, self._fd)
        except OSError as error:
            if not no_room(error):
                raise
            # Some file systems find out only now. What the kernel still had of it is lost: all is written again.
            os.ftruncate(self._fd, self._synced_bytes)
            self.waiting_bytes += self._size_bytes - self._synced_bytes
            self._size_bytes = self._synced_bytes
            self._waiting.extendleft(reversed(self._unsynced))
            self._unsynced.clear()
            return False
        self._synced += count
        self._synced_bytes = size_bytes
        for _ in range(count):
            self._unsynced.popleft()
        return True

    def _due(self) -> bool:
        """Drop the oldest files beyond the bound; whether this one, all on disk, is long enough."""
        if not self._limit_bytes or self._unsynced or self._waiting:
            return False
        self._drop_oldest()
        return self._size_bytes - self._head_bytes >= self._limit_bytes // SEGMENTS

    async def _begin_next(self) -> None:
        """Sum up all that came, and start a file with that."""
        self._deferred = deque()
        try:
            head = await asyncio.to_thread(self._head)
            if head is not None:  # else what came before could not be done without
                self._switch(head)
        finally:
            self._append_deferred()

    def _head(self) -> bytes | None:
        """The line that a new file begins with; empty where nothing follows the records. In a thread."""
        summary = self._sum_up()
        if summary is None:
            return None
        return large_line_of(self._record("summary", summary)) if summary else b""

    def _append_deferred(self) -> None:
        deferred, self._deferred = self._deferred or (), None
        for time_s, kind, fields in deferred:
            self._append(time_s, kind, fields)

    def _switch(self, head: bytes) -> None:
        fresh = _fresh(self.path)
        try:
            descriptor = _open(fresh)
        except OSError as error:
            if not no_room(error):
                raise
            return
        segment = self.path.with_name(f"{self.path.stem}-{self._first:012d}{self.path.suffix}")
        self.path.rename(segment)
        sync_directory(self.path.parent)  # an outage must not leave the second name without the first
        fresh.rename(self.path)
        sync_directory(self.path.parent)
        self._segments.append(Segment(segment, self._size_bytes, self._last_position))
        os.close(self._fd)
        self._fd, self._first = descriptor, self._next
        self._size_bytes = self._synced_bytes = self._head_bytes = 0
        self._append_head(head)

    def _drop_oldest(self) -> None:
        total_bytes = sum(segment.size_bytes for segment in self._segments)
        allowed_bytes = self._limit_bytes - self._limit_bytes // SEGMENTS  # the file that grows has the rest
        while self._segments and total_bytes > allowed_bytes:
            oldest = self._segments[0]
            if oldest.last_position >= self.frontier():
                return
            oldest.path.unlink(missing_ok=True)
            total_bytes -= oldest.size_bytes
            self._segments.popleft()
            log.info("journal_segment_dropped", path=str(oldest.path), last_position=oldest.last_position)

    def close(self) -> None:
        """Close the file; what still waits is lost with the process."""
        self._append_deferred()
        if not self.flush():
            log.error("journal_records_lost", count=len(self._waiting))
        os.close(self._fd)


def segments(path: Path) -> list[Path]:
    """The files of a journal, oldest first. The newest is there, unless there is no journal, or it was lost."""
    newest = _fresh(path) if not path.exists() and _fresh(path).exists() else path
    return [*sorted(path.parent.glob(f"{path.stem}-*{path.suffix}")), newest]


def read_journal(path: Path) -> Recovered:
    """Read a journal, all that is left of it, without changing it."""
    records: list[dict[str, Any]] = []
    cut_bytes = 0
    for segment in segments(path):
        part = _parse(segment, segment.read_bytes(), _number_after(records))
        records += part.records
        cut_bytes += part.cut_bytes
    return Recovered(records, cut_bytes)


def _fresh(path: Path) -> Path:
    """What the next file is called until it takes the place of the one before."""
    return path.with_suffix(".new")


def _finish_switch(path: Path) -> None:
    """Do what is left of a switch in which a process was killed. Raises `JournalCorrupt` for a lost newest file."""
    *older, newest = segments(path)
    if newest != path:
        newest.rename(path)
        sync_directory(path.parent)
    elif path.exists():
        _fresh(path).unlink(missing_ok=True)  # the one before still has its name: nothing is in it
    elif older:
        raise JournalCorrupt(f"{path}, the newest part of the journal, is missing", path=str(path))


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _last_position(records: Iterable[Mapping[str, Any]]) -> int:
    """The highest position that records speak of; -1 where they speak of none."""
    return max((max((record.get("position", -1), *record.get("positions", ()))) for record in records), default=-1)


def _number_after(records: list[dict[str, Any]]) -> int | None:
    return int(records[-1]["n"]) + 1 if records else None


def _parse(path: Path, data: bytes, number: int | None) -> Recovered:
    """`number`: that of the first record; None takes it from there, since earlier segments may be gone."""
    *lines, tail = data.split(b"\n")
    records = [_record(path, index, line) for index, line in enumerate(lines)]
    first = int(records[0]["n"]) if records and number is None else number or 0
    for expected, record in enumerate(records, start=first):
        if record["n"] != expected:
            raise JournalCorrupt(f"{path}: record {expected} is missing", path=str(path), record=expected)
    return Recovered(records, len(tail))


def _record(path: Path, index: int, line: bytes) -> dict[str, Any]:
    digits, body = line[:8], line[9:]
    if digits != b"%08x" % zlib.crc32(body) or line[8:9] != b" ":
        raise JournalCorrupt(f"{path}: line {index} does not match its checksum", path=str(path), line=index)
    return json.loads(body)
