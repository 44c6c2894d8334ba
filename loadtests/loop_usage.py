"""What a process with an event loop uses between two looks: the loop's lag, processor time, memory."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

INTERVAL_S = 0.005


@dataclass(frozen=True)
class Usage:
    """Between two looks."""

    lag_p99_s: float
    """By how much timers came late, 99th percentile."""
    lag_max_s: float
    busy_p99_s: float
    """Processor time of the loop's thread between two timers beyond their interval: the lag on an idle machine."""
    cpu_s: float
    """Of all threads."""
    growth_bytes: int
    """The most resident memory, beyond what was resident at the first look."""


class Probe:
    """Watches the loop it is entered on."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        self._resident_bytes = _status_bytes("VmRSS")
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def take(self) -> Usage:
        """What was used since the last call."""
        lags, busy = np.array(self._lags or [0.0]), np.array(self._busy or [0.0])
        usage = Usage(
            lag_p99_s=float(np.percentile(lags, 99)),
            lag_max_s=float(lags.max()),
            busy_p99_s=float(np.percentile(busy, 99)),
            cpu_s=time.process_time() - self._cpu_s,
            growth_bytes=_status_bytes("VmHWM") - self._resident_bytes,
        )
        self._start()
        return usage

    def _start(self) -> None:
        self._lags: list[float] = []
        self._busy: list[float] = []
        self._cpu_s = time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident

    async def _watch(self) -> None:
        while True:
            due_s, used_s = time.monotonic() + INTERVAL_S, time.thread_time()
            await asyncio.sleep(INTERVAL_S)
            self._lags.append(max(0.0, time.monotonic() - due_s))
            self._busy.append(max(0.0, time.thread_time() - used_s - INTERVAL_S))


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)
