"""When the engine worked, as intervals for the run's timeline."""

from __future__ import annotations

from collections import deque

from slipstream.engine.base import BusyInterval

BRIDGED_GAP_S = 0.02
LONGEST_S = 1.0
KEPT = 10_000


class BusyLog:
    """Merges steps into intervals, for each kind. Written by the engine's thread, drained by another."""

    def __init__(self) -> None:
        self._open: dict[str, BusyInterval] = {}
        self._done: deque[BusyInterval] = deque(maxlen=KEPT)

    def add(self, step: BusyInterval) -> None:
        """Count one step in."""
        current = self._open.get(step.kind)
        if current is not None:
            if step.start_s - current.end_s < BRIDGED_GAP_S and step.end_s - current.start_s < LONGEST_S:
                self._open[step.kind] = BusyInterval(step.kind, current.start_s, step.end_s)
                return
            self._done.append(current)
        self._open[step.kind] = step

    def drain(self, now_s: float) -> list[BusyInterval]:
        """Intervals that no later step can extend."""
        for kind, current in list(self._open.items()):
            # Idle since: close it, unless the engine's thread did just now.
            if now_s - current.end_s > LONGEST_S and self._open.get(kind) is current:
                del self._open[kind]
                self._done.append(current)
        intervals = []
        while self._done:
            intervals.append(self._done.popleft())
        return intervals
