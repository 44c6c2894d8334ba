"""Where the time of a step goes. On a card work is queued, so its phases are measured by events on the stream."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PhaseClock:
    """Sums of seconds by phase, since it was read last."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as that of a phase; one that raises is not counted."""
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started_s = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started_s

    def read(self) -> dict[str, float]:
        """`<phase>_s` of each phase there was; starts again from nothing. Waits for the card."""
        if self._events:
            torch.cuda.synchronize()
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        figures = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        self._events.clear()
        self._seconds.clear()
        return figures
