"""`rollouts/<replica>.jsonl`: every finished rollout as a person would read it, up to a byte bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()


class RolloutLog:
    """Appends lines until the bound; what comes after it is counted, not written."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._limit_bytes = limit_bytes
        self.size_bytes = self._file.tell()
        self.unwritten_count = 0

    def write(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines).encode()
        if self.size_bytes + len(data) > self._limit_bytes:
            self._skip(len(lines), f"the bound of {self._limit_bytes} bytes is reached")
            return
        try:
            self._file.write(data)
        except OSError as error:  # a full disk costs the log, not the rollouts
            self._skip(len(lines), str(error))
            return
        self.size_bytes += len(data)

    def _skip(self, count: int, why: str) -> None:
        if self.unwritten_count == 0:
            log.warning("rollout_log_stopped", detail=why)
        self.unwritten_count += count

    def close(self) -> None:
        self._file.close()
