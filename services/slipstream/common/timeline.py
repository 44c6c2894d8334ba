"""`<run_dir>/timeline/<replica>.jsonl`: what a process did when. One JSON object a line, times in Unix seconds.

A line is an interval of work (`kind` says of which), a span of a trace (`kind` is "span"), or both: `tracing.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from slipstream.common.disk import AppendFile, PatientFile

log = structlog.get_logger()

KEPT_FILES = 1
BUFFER_BYTES = 1 << 20


class TimelineFile:
    """Appends lines, each with the kernel when `record` returns: whoever is killed leaves what it had done."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """`limit_bytes`: on disk, of this file and the older one that it becomes; 0 means no bound."""
        self.path = path
        self._limit_bytes = limit_bytes
        self._waiting = False
        self._file = PatientFile(AppendFile(path, limit_bytes // (KEPT_FILES + 1), KEPT_FILES), BUFFER_BYTES)

    def record(self, kind: str, start_s: float, end_s: float, **fields: object) -> None:
        self.record_all(kind, [(start_s, end_s, fields)])

    def record_all(self, kind: str, lines: Sequence[tuple[float, float, Mapping[str, object]]]) -> None:
        """Several at once: when each began, when it ended, and what else is said of it."""
        self._file.write(b"".join(_line(kind, *line) for line in lines))
        if self._file.stuck != self._waiting:
            self._waiting = self._file.stuck
            if self._waiting:
                log.warning(
                    "timeline_waits_for_room", path=str(self.path), detail="its disk is full: what comes may be lost"
                )
            else:
                log.info("timeline_goes_on", path=str(self.path), dropped_count=self._file.dropped_count)

    def beside(self, name: str) -> TimelineFile:
        """A file of the same kind for what belongs to this one's process."""
        return TimelineFile(self.path.with_name(f"{self.path.stem}-{name}.jsonl"), self._limit_bytes)

    def close(self) -> None:
        self._file.close()


def _line(kind: str, start_s: float, end_s: float, fields: Mapping[str, object]) -> bytes:
    line = {"kind": kind, "start_s": round(start_s, 6), "end_s": round(end_s, 6), **fields}
    return json.dumps(line).encode() + b"\n"
