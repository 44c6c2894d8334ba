"""Watches the disk: pauses the run before it is full, or when a writer found it so, and lets it go on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from slipstream.common.disk import free_bytes
from slipstream.orchestrator.config import DiskConfig
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.run_state import DISK, RunState

_RESUME_FACTOR = 1.25
"""The run goes on at this multiple of the threshold: one that went on at the threshold itself would stop at once."""
_MIB = 2**20
_LOOK = "if there seems to be enough, the log there says what is short, such as a quota, or files to open"


class Waiting(Protocol):
    """A file whose records wait in memory while the disk has no room."""

    def flush(self) -> bool:
        """Write what waits; False while there is no room."""
        ...


class DiskWatch:
    """Keeps the pause `DISK` of a run. One loop; nothing else sets it."""

    def __init__(
        self,
        config: DiskConfig,
        run_dir: Path,
        state: RunState,
        leases: RunnerLeases,
        files: Sequence[Waiting],
        on_room: Callable[[], None],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._state = state
        self._leases = leases
        self._files = files
        self._on_room = on_room

    async def run(self) -> NoReturn:
        """Look for ever."""
        while True:
            self.look()
            await asyncio.sleep(self._config.check_interval_s)

    def look(self) -> None:
        """Write what waits for room; pause, or go on."""
        flushed = not [file for file in self._files if not file.flush()]
        reason = self._reason(flushed)
        if reason:
            self._state.pause(DISK, reason)
        elif DISK in self._state.pauses:
            self._state.resume(DISK)
            self._on_room()

    def _reason(self, flushed: bool) -> str | None:
        free = free_bytes(self._run_dir)
        needed = self._config.min_free_bytes
        if DISK in self._state.pauses:
            needed = int(needed * _RESUME_FACTOR)
        if free < needed:
            return self._sentence(free, f"{_mib(needed)} are needed")
        if not flushed:
            return self._sentence(free, f"the journal and the metrics find no room; {_LOOK}")
        full = [runner.runner_id for runner in self._leases.runners if runner.disk_full]
        if full:
            return self._sentence(free, f"the rollouts of {', '.join(full)} find no room; {_LOOK}")
        if self._state.trainer_disk_full:
            return self._sentence(free, f"what the trainer made finds no room; {_LOOK}")
        return None

    def _sentence(self, free: int, why: str) -> str:
        return (
            f"the disk is full (DISK_FULL): {_mib(free)} are free in {self._run_dir}, {why}; "
            "nothing is lost, and the run goes on when there is room"
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"
