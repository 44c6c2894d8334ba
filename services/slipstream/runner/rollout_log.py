"""`rollouts/<replica>.jsonl.zst`: every finished rollout as a person would read it; `slipstream rollouts` shows them.

Rollouts of evaluations have a file of their own, `<replica>.evaluation.jsonl.zst`. Of either the newest are kept, up to
a byte bound. Records are gathered for `FRAME_S` or `FRAME_BYTES`, whichever comes first, and written as one compressed
frame: that much a kill may lose. While the disk is full frames wait in memory; `full` then closes admission, before any
is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog

from slipstream.common.compressed_lines import SUFFIX, encode_frame, encode_line
from slipstream.common.disk import RETRY_S, AppendFile, PatientFile

log = structlog.get_logger()

KEPT_FILES = 1
EVALUATION = "evaluation"
FRAME_S = 1.0
"""Records are in memory alone for this long at most, in seconds, and a little more where the loop is late."""
FRAME_BYTES = 256 << 10
"""So are these many bytes, before compression, and those of one group."""


class RolloutLog:
    """Appends records, one a rollout."""

    def __init__(
        self,
        directory: Path,
        replica: str,
        limit_bytes: int,
        buffer_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_bytes` on disk at most, and as many of evaluations; `buffer_bytes` wait in memory at most."""
        self._newest = _Frames(directory / f"{replica}{SUFFIX}", limit_bytes, buffer_bytes, clock)
        self._evaluations = _Frames(directory / f"{replica}.{EVALUATION}{SUFFIX}", limit_bytes, buffer_bytes, clock)
        self._files = (self._newest, self._evaluations)
        self._warned = False

    @property
    def full(self) -> bool:
        """Whether records wait for room on the disk: no new group should be taken."""
        return any(frames.file.stuck for frames in self._files)

    @property
    def dropped_count(self) -> int:
        """Frames that found the buffer full, too."""
        return sum(frames.file.dropped_count for frames in self._files)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Log the rollouts of one group, within `FRAME_S` or when there is room."""
        evaluation = bool(records) and records[0].get("purpose") == EVALUATION
        (self._evaluations if evaluation else self._newest).write([encode_line(record) for record in records])
        self._tell()

    async def flush_loop(self) -> NoReturn:
        """Write what is due, and what waits as soon as there is room, for ever. Waits on its clock alone."""
        while True:
            await asyncio.sleep(RETRY_S)
            for frames in self._files:
                frames.write_due()
            self._tell()

    def flush(self) -> bool:
        """Write everything; False while the disk has no room."""
        flushed = not [frames for frames in self._files if not frames.flush()]
        self._tell()
        return flushed

    def close(self) -> None:
        for frames in self._files:
            frames.close()
        if self.dropped_count:
            log.error("rollouts_not_logged", frame_count=self.dropped_count)

    def _tell(self) -> None:
        if self.full != self._warned:
            self._warned = self.full
            if self.full:
                waiting_bytes = sum(frames.file.waiting_bytes for frames in self._files)
                log.warning("rollout_log_waits_for_room", waiting_bytes=waiting_bytes)
            else:
                log.info("rollout_log_goes_on", dropped_count=self.dropped_count)


class _Frames:
    """One file, and the lines of its next frame."""

    def __init__(self, path: Path, limit_bytes: int, buffer_bytes: int, clock: Callable[[], float]) -> None:
        self.file = PatientFile(AppendFile(path, limit_bytes // (KEPT_FILES + 1), KEPT_FILES), buffer_bytes)
        self._clock = clock
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._since_s = 0.0

    def write(self, lines: Sequence[bytes]) -> None:
        if not self._lines:
            self._since_s = self._clock()
        self._lines += lines
        self._size_bytes += sum(map(len, lines))
        if self._size_bytes >= FRAME_BYTES:
            self._end_frame()

    def write_due(self) -> None:
        if self._clock() - self._since_s >= FRAME_S:
            self._end_frame()
        self.file.flush()

    def flush(self) -> bool:
        self._end_frame()
        return self.file.flush()

    def close(self) -> None:
        self._end_frame()
        self.file.close()

    def _end_frame(self) -> None:
        if self._lines:
            frame = encode_frame(self._lines)
            self._lines, self._size_bytes = [], 0
            self.file.write(frame)
