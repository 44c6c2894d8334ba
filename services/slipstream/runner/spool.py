"""What a runner must not lose: rows and reports of finished groups until they are released, and groups under way.

Each attempt at a group has files of its own under `<run_dir>/spool/<runner>/`: `<number>.turns` from its start, with
its assignment and its turns as they end, and `<number>.rows` once it has finished, with its rows and its report. The
latter is on disk before the group is reported, so that whatever is sealed outlives this process and its machine; turns
outlive the process only. A file goes when its last row is released.

The spool has a byte bound, in blocks of the disk. A full spool takes no new group (the acquire loop waits), so rows
that the trainer still needs are never dropped to make room. What finds no room on the disk waits in memory, is counted
(`waiting_count`), and pauses the run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.disk import RETRY_S, full_disk_named, no_file, sync_directory
from slipstream.common.errors import DiskFull
from slipstream.runner import spool_file, telemetry
from slipstream.runner.spool_file import Record
from slipstream.runner.unfinished import Unfinished, read_session_records, read_unfinished

log = structlog.get_logger()

BLOCK_BYTES = 4096
"""What a file takes at least; it covers what its keys take in memory, too."""
OPEN_FILES = 64
SWEEP_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows under one key: little-endian elements, position by position from `first_position`."""

    data: bytes
    first_position: int = 0
    crc32: int | None = None


@dataclass(slots=True)
class _Group:
    """The file of a finished attempt."""

    name: str
    epoch: str
    path: Path
    size_bytes: int = 0
    rows: dict[str, Record] = field(default_factory=dict[str, Record])
    """By key; a released one is gone."""
    report: Record | None = None


class Spool:
    """A byte-bounded map from key to rows, on disk. Use from the event loop; files are written by threads."""

    def __init__(self, directory: Path, limit_bytes: int, epoch: str = "") -> None:
        """Takes up what an earlier process left in `directory`, which is this runner's alone."""
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.torn_bytes = 0
        """What an earlier process was writing when it died."""
        self.unfinished: list[Unfinished] = []
        """Groups that an earlier process was at."""
        self._directory = directory
        self._epoch = epoch
        self._groups: dict[str, _Group] = {}
        self._by_key: dict[str, _Group] = {}
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._turns: dict[str, tuple[Path, int]] = {}
        """File and size of groups under way, by name."""
        self._dead: list[Path] = []
        self.waiting_count: int = 0
        """Finished groups that wait for room on the disk."""
        self._damaged: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.stem) for path in directory.iterdir() if path.stem.isdecimal()]
        self._numbers = itertools.count(max(numbers, default=0) + 1)
        self._recover()

    @property
    def full(self) -> bool:
        return self.size_bytes >= self.limit_bytes

    # ---- finished groups

    async def keep(self, name: str, report: runner_pb2.GroupReport, rows: Mapping[str, Rows]) -> None:
        """Hold the rows of a finished attempt, and its report, from now on. Waits while the disk has no room.

        What was held under the same name goes: it is what an attempt left that nobody knows of any more.
        """
        group = _Group(name, self._epoch, self._directory / f"{next(self._numbers)}.rows")
        parts = [*spool_file.encode({"kind": "group", "name": name, "epoch": self._epoch}, b"")]
        for key, held in rows.items():
            parts += spool_file.encode({"kind": "rows", "key": key, "first": held.first_position}, held.data)
        parts += spool_file.encode({"kind": "report"}, report.SerializeToString())
        waits = False
        try:
            while True:
                try:
                    written = await self._written(group.path, parts)
                    break
                except DiskFull as error:
                    if not waits:
                        waits, self.waiting_count = True, self.waiting_count + 1
                        log.warning("spool_waits_for_room", group=name, reason=error.reason, detail=error.message)
                self._close_files()  # where too many are open, these are some of them
                await asyncio.sleep(RETRY_S)
        finally:
            self.waiting_count -= waits
        if name in self._groups:
            self._remove(self._groups[name])
        self._take(group, written)
        self.drop(name)

    def get(self, key: str, epoch: str = "") -> Rows | None:
        """Rows of a key, if they are those of the process that `epoch` names (empty: of any) and are as written.

        Raises:
            TooManyFiles: they are held, and cannot be read now.
        """
        group = self._by_key.get(key)
        if group is None or (epoch and epoch != group.epoch):
            return None
        record = group.rows[key]
        data = self._read(group, record)
        if data is None:
            self._note_damaged(key, group.path)
            return None
        return Rows(data, int(record.meta["first"]), record.crc32)

    def release(self, key: str) -> bool:
        """Drop rows; false if the key is not held."""
        group = self._by_key.pop(key, None)
        if group is None:
            return False
        del group.rows[key]
        if not group.rows:
            self._remove(group)
        return True

    def reports(self) -> Iterator[runner_pb2.GroupReport]:
        """The reports of all groups that are held, as they were written. Raises `TooManyFiles`."""
        for group in list(self._groups.values()):
            if group.report is None or self._groups.get(group.name) is not group:
                continue
            data = self._read(group, group.report)
            if data is None:
                self._note_damaged(f"report of {group.name}", group.path)
                continue
            yield runner_pb2.GroupReport.FromString(data)

    # ---- groups under way

    def begin(self, name: str, assignment: runner_pb2.GroupAssignment) -> None:
        """Remember that this attempt is under way. Where the disk has no room for that, it dies with this process.

        What is held under the same name goes: an orchestrator whose journal lost its end gives the name out again, and
        must not be told that the earlier attempt was the later one.
        """
        self.drop(name)
        if name in self._groups:
            log.warning("spool_name_given_out_again", group=name)
            self._remove(self._groups[name])
        path = self._directory / f"{next(self._numbers)}.turns"
        meta = {"kind": "assignment", "name": name, "monotonic_s": round(time.monotonic(), 3)}
        self._turns[name] = (path, 0)
        self.append(name, meta, assignment.SerializeToString())

    def append(self, name: str, meta: Mapping[str, object], data: bytes) -> None:
        """Add to what is remembered of an attempt that is under way; nothing, if nothing is."""
        held = self._turns.get(name)
        if held is None:
            return
        path, before = held
        try:
            after = before + _append(path, spool_file.encode(meta, data))
        except OSError as error:
            log.warning("spool_turn_not_kept", group=name, detail=str(error))
            self.drop(name)
            return
        self.size_bytes += _blocks(after) - _blocks(before)
        self._turns[name] = (path, after)

    async def session_records(self, name: str, index: int) -> list[tuple[dict[str, Any], bytes | None]]:
        """What is remembered of a session of an attempt that is under way; None is what can no longer be read.

        `index`: its own among the attempt's. Those of others may be far larger, and are left on disk.
        """
        held = self._turns.get(name)
        if held is None:
            return []
        try:
            return await asyncio.to_thread(read_session_records, held[0], index)
        except OSError as error:
            log.warning("spool_file_unreadable", path=str(held[0]), detail=str(error))
            return []

    def drop(self, name: str) -> None:
        """Forget an attempt that is no longer under way."""
        path, size_bytes = self._turns.pop(name, (None, 0))
        if path is not None:
            self.size_bytes -= _blocks(size_bytes)
            self._dead.append(path)

    # ---- files

    async def sweep_loop(self) -> NoReturn:
        """Remove files that nobody needs, for ever. Waits on its clock alone."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            await self.sweep()

    async def sweep(self) -> None:
        dead, self._dead = self._dead, []
        for path in dead:
            descriptor = self._open.pop(path, None)
            if descriptor is not None:
                os.close(descriptor)
        if dead:
            await asyncio.to_thread(_unlink, dead)

    def close(self) -> None:
        _unlink(self._dead)
        self._dead = []
        self._close_files()

    def _recover(self) -> None:
        for path in sorted(self._directory.glob("*.rows"), key=lambda p: int(p.stem)):
            found = spool_file.scan(path)
            self._note_scan(path, found)
            first = found.records[0].meta if found.records else {}
            finished = found.damaged_count or (found.records and found.records[-1].meta["kind"] == "report")
            if found.torn_bytes or not finished or first.get("kind") != "group":
                self._dead.append(path)  # not reported: what it was to be made of is in the other file
                continue
            if first["name"] in self._groups:
                self._remove(self._groups[first["name"]])
            self._take(_Group(first["name"], first["epoch"], path), found)
        latest: dict[str, Unfinished] = {}
        for path in sorted(self._directory.glob("*.turns"), key=lambda p: int(p.stem)):
            found = spool_file.scan(path)
            self._note_scan(path, found)
            unfinished = read_unfinished(path, found)
            if unfinished is None or unfinished.name in self._groups:
                self._dead.append(path)
                continue
            os.truncate(path, found.end_bytes)
            self.drop(unfinished.name)
            self._turns[unfinished.name] = (path, found.end_bytes)
            self.size_bytes += _blocks(found.end_bytes)
            self.append(unfinished.name, {"kind": "resumed", "epoch": self._epoch}, b"")
            latest[unfinished.name] = unfinished  # of two files of a name, which a crash can leave, the later one
        self.unfinished = [each for each in latest.values() if each.name in self._turns]
        telemetry.groups_taken_up.labels("finished").inc(len(self._groups))
        if self._groups or self.unfinished or self.torn_bytes:
            log.info(
                "spool_recovered",
                finished_count=len(self._groups),
                unfinished_count=len(self.unfinished),
                torn_bytes=self.torn_bytes,
                size_bytes=self.size_bytes,
            )

    def _note_scan(self, path: Path, found: spool_file.Scan) -> None:
        self.torn_bytes += found.torn_bytes
        if found.torn_bytes:
            log.warning("spool_tail_cut", path=str(path), torn_bytes=found.torn_bytes)
        if found.damaged_count:
            telemetry.spool_damaged.inc(found.damaged_count)
            log.error("spool_file_damaged", path=str(path), record_count=found.damaged_count)

    def _note_damaged(self, what: str, path: Path) -> None:
        if what not in self._damaged:
            self._damaged.add(what)
            telemetry.spool_damaged.inc()
            log.error("spool_record_lost", what=what, path=str(path))

    async def _written(self, path: Path, parts: list[bytes]) -> spool_file.Scan:
        """Write a file, and sync it, in a thread. Raises `DiskFull` if there is no room for it."""
        writing = asyncio.ensure_future(asyncio.to_thread(_write_file, path, parts))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(lambda _: self._dead.append(path))
            raise

    def _take(self, group: _Group, found: spool_file.Scan) -> None:
        for record in found.records:
            match record.meta.get("kind"):
                case "rows":
                    group.rows[record.meta["key"]] = record
                case "report":
                    group.report = record
                case _:
                    pass
        group.size_bytes = _blocks(found.end_bytes)
        self.size_bytes += group.size_bytes
        self._groups[group.name] = group
        self._by_key |= dict.fromkeys(group.rows, group)
        if not group.rows:
            self._remove(group)

    def _remove(self, group: _Group) -> None:
        for key in group.rows:
            self._by_key.pop(key, None)
        del self._groups[group.name]
        self.size_bytes -= group.size_bytes
        self._dead.append(group.path)

    def _read(self, group: _Group, record: Record) -> bytes | None:
        try:
            with full_disk_named(group.path):
                return spool_file.read(self._descriptor(group.path), record)
        except OSError as error:
            log.warning("spool_file_unreadable", path=str(group.path), detail=str(error))
            return None

    def _descriptor(self, path: Path) -> int:
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            descriptor = self._open[path] = self._opened(path)
        else:
            self._open.move_to_end(path)
        return descriptor

    def _opened(self, path: Path) -> int:
        """Open a file. Where too many are open, the one that was read longest ago is closed for it."""
        while True:
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if not no_file(error) or not self._open:
                    raise
                os.close(self._open.popitem(last=False)[1])

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _write_file(path: Path, parts: list[bytes]) -> spool_file.Scan:
    try:
        with full_disk_named(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                spool_file.write(descriptor, parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(path.parent)
            return spool_file.scan(path)
    except DiskFull:
        path.unlink(missing_ok=True)
        raise


def _append(path: Path, parts: list[bytes]) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        return spool_file.write(descriptor, parts)
    finally:
        os.close(descriptor)


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
