"""`<run_dir>/timeline/<replica>.jsonl`: when the engine worked, for the overlap figure of the report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from slipstream.common.disk import AppendFile, PatientFile
from slipstream.engine.base import BusyInterval

BRIDGED_GAP_S = 0.02
KEPT_FILES = 1
BUFFER_BYTES = 1 << 20


class Timeline:
    """Appends intervals; stretches of the same kind with shorter gaps than `BRIDGED_GAP_S` are one."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """`limit_bytes`: on disk, of this file and the older one that it becomes; 0 means no bound."""
        self._file = PatientFile(AppendFile(path, limit_bytes // (KEPT_FILES + 1), KEPT_FILES), BUFFER_BYTES)
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
        line = {"kind": kind, "start_s": round(start_s, 4), "end_s": round(end_s, 4), **fields}
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        for last in self._last.values():
            self.record(last.kind, last.start_s, last.end_s)
        self._last.clear()
        self._file.close()
