"""The trainer's part of the run's timeline: one JSON object a line, `<run_dir>/timeline/<replica>.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Timeline:
    """Appends intervals of work in Unix seconds. Kinds: "sft", "train_step", "publish"."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    @contextmanager
    def interval(self, kind: str, **fields: object) -> Iterator[None]:
        """Record how long the block took. A block that raises leaves no record."""
        start_s = time.time()
        yield
        record = {"kind": kind, "start_s": start_s, "end_s": time.time(), **fields}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
