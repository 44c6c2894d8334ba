"""What a restarted runner finds of a group that its predecessor was at."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.runner import spool_file
from slipstream.runner.spool_file import Scan


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An attempt that was under way."""

    name: str
    assignment: runner_pb2.GroupAssignment
    begun_s: float
    """On the machine's monotonic clock, which all its processes share until it starts again."""
    resumed_count: int
    """How often it was taken up, this time included: the requests of each time have names of their own."""

    @property
    def elapsed_s(self) -> float:
        """Since it was begun, in seconds."""
        return max(0.0, time.monotonic() - self.begun_s)


def read_unfinished(path: Path, found: Scan) -> Unfinished | None:
    """What a file of turns says; None where its beginning is gone. Raises `OSError`."""
    first = found.records[0] if found.records else None
    if first is None or first.meta.get("kind") != "assignment":
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = spool_file.read(descriptor, first)
    finally:
        os.close(descriptor)
    if data is None:
        return None
    resumed = 1 + sum(record.meta.get("kind") == "resumed" for record in found.records)
    return Unfinished(
        first.meta["name"], runner_pb2.GroupAssignment.FromString(data), float(first.meta["monotonic_s"]), resumed
    )
