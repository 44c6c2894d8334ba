"""`<run_dir>/timeline/<replica>.jsonl`: when the engine worked, for the overlap figure of the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipstream.common.timeline import TimelineFile
from slipstream.engine.base import BusyInterval

BRIDGED_GAP_S = 0.02


class Timeline:
    """Appends intervals; stretches of the same kind with shorter gaps than `BRIDGED_GAP_S` are one."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """`limit_bytes`: on disk, of this file and the older one that it becomes; 0 means no bound."""
        self.file = TimelineFile(path, limit_bytes)
        self._last: dict[str, BusyInterval] = {}

    def add(self, intervals: Iterable[BusyInterval], now_s: float) -> None:
        """Take in what the engine did; `now_s` ends what cannot go on any more."""
        for interval in intervals:
            last = self._last.get(interval.kind)
            if last is not None and interval.start_s - last.end_s < BRIDGED_GAP_S:
                self._last[interval.kind] = BusyInterval(interval.kind, last.start_s, interval.end_s)
            else:
                if last is not None:
                    self.record(last.kind, last.start_s, last.end_s)
                self._last[interval.kind] = interval
        for kind, last in list(self._last.items()):
            if now_s - last.end_s > 1.0:
                self.record(kind, last.start_s, last.end_s)
                del self._last[kind]

    def record(self, kind: str, start_s: float, end_s: float, **fields: object) -> None:
        """Write one interval, Unix seconds."""
        self.file.record(kind, start_s, end_s, **fields)

    def close(self) -> None:
        for last in self._last.values():
            self.record(last.kind, last.start_s, last.end_s)
        self._last.clear()
        self.file.close()
