"""The trainer's part of the run's timeline: one JSON object a line, `<run_dir>/timeline/<replica>.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.common.disk import AppendFile, PatientFile

KEPT_FILES = 1
BUFFER_BYTES = 1 << 20


class Timeline:
    """Appends intervals of work in Unix seconds. Kinds: "sft", "train_step", "publish"."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """`limit_bytes`: on disk, of this file and the older one that it becomes; 0 means no bound."""
        self._file = PatientFile(AppendFile(path, limit_bytes // (KEPT_FILES + 1), KEPT_FILES), BUFFER_BYTES)

    @contextmanager
    def interval(self, kind: str, **fields: object) -> Iterator[None]:
        """Record how long the block took. A block that raises leaves no record."""
        start_s, began_s = time.time(), time.monotonic()
        yield
        end_s = start_s + time.monotonic() - began_s  # a clock that is set meanwhile does not change how long it took
        record = {"kind": kind, "start_s": start_s, "end_s": end_s, **fields}
        self._file.write(json.dumps(record).encode() + b"\n")
