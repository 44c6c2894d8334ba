"""`rollouts/<replica>.jsonl`: every finished rollout as a person would read it.

Rollouts of evaluations have a file of their own, `<replica>.evaluation.jsonl`: the report shows them, and there are
only as many as the configuration asks. Of the others the newest are kept, up to a byte bound. While the disk is full
lines wait in memory; `full` then closes admission, before any is lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog

from slipstream.common.disk import RETRY_S, AppendFile, PatientFile

log = structlog.get_logger()

KEPT_FILES = 1
EVALUATION = "evaluation"


class RolloutLog:
    """Appends lines, one a rollout."""

    def __init__(self, path: Path, limit_bytes: int, buffer_bytes: int = 64 << 20) -> None:
        """`limit_bytes` on disk at most, evaluations apart; `buffer_bytes` wait in memory at most."""
        newest = AppendFile(path, limit_bytes // (KEPT_FILES + 1), KEPT_FILES)
        evaluations = AppendFile(path.with_suffix(f".{EVALUATION}{path.suffix}"))
        self._newest = PatientFile(newest, buffer_bytes)
        self._evaluations = PatientFile(evaluations, buffer_bytes)
        self._files = (self._newest, self._evaluations)
        self._warned = False

    @property
    def full(self) -> bool:
        """Whether lines wait for room on the disk: no new group should be taken."""
        return any(file.stuck for file in self._files)

    @property
    def dropped_count(self) -> int:
        """Writes that found the buffer full, too."""
        return sum(file.dropped_count for file in self._files)

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Log the rollouts of one group, now or when there is room."""
        data = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines).encode()
        evaluation = bool(lines) and lines[0].get("purpose") == EVALUATION
        (self._evaluations if evaluation else self._newest).write(data)
        self._tell()

    async def flush_loop(self) -> NoReturn:
        """Write what waits as soon as there is room, for ever. Waits on its clock alone."""
        while True:
            await asyncio.sleep(RETRY_S)
            self.flush()

    def flush(self) -> bool:
        """Write what waits; False while the disk has no room."""
        flushed = not [file for file in self._files if not file.flush()]
        self._tell()
        return flushed

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self.dropped_count:
            log.error("rollouts_not_logged", write_count=self.dropped_count)

    def _tell(self) -> None:
        if self.full != self._warned:
            self._warned = self.full
            if self.full:
                log.warning("rollout_log_waits_for_room", waiting_bytes=sum(file.waiting_bytes for file in self._files))
            else:
                log.info("rollout_log_goes_on", dropped_count=self.dropped_count)
