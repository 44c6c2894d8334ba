"""What a restarted runner finds of a group that its predecessor was at."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.runner import spool_file
from slipstream.runner.spool_file import Scan

TurnKey = tuple[int, int, int]
"""Of the rollouts of a group the index, the position where the turn begins, and the CRC-32 of all tokens before."""

SESSION_KINDS = ("session_turn", "session_end")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An attempt that was under way."""

    name: str
    assignment: runner_pb2.GroupAssignment
    begun_s: float
    """On the machine's monotonic clock, which all its processes share until it starts again."""
    resumed_count: int
    """How often it was taken up, this time included: the requests of each time have names of their own."""
    turns: Mapping[TurnKey, bytes]
    """Those that had ended, each a `RolloutRecord`."""
    session_records: Sequence[tuple[dict[str, Any], bytes | None]] = ()
    """Of a group of sessions, as `SessionLog` writes them; None is what can no longer be read."""

    @property
    def elapsed_s(self) -> float:
        """Since it was begun, in seconds."""
        return max(0.0, time.monotonic() - self.begun_s)


def read_session_records(path: Path, index: int) -> list[tuple[dict[str, Any], bytes | None]]:
    """What `SessionLog` has written of a member into a file of turns so far. Raises `OSError`."""
    records = [each for each in spool_file.scan(path).records if each.meta["kind"] in SESSION_KINDS]
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [(each.meta, spool_file.read(descriptor, each)) for each in records if each.meta["index"] == index]
    finally:
        os.close(descriptor)


def read_unfinished(path: Path, found: Scan) -> Unfinished | None:
    """What a file of turns says; None where its beginning is gone. Raises `OSError`."""
    first = found.records[0] if found.records else None
    if first is None or first.meta["kind"] != "assignment":
        return None
    turns: dict[TurnKey, bytes] = {}
    session_records: list[tuple[dict[str, Any], bytes | None]] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        assignment = spool_file.read(descriptor, first)
        for record in found.records[1:]:
            meta = record.meta
            # One that is damaged is sampled again, and what follows it: its answer is part of all later prompts.
            if meta["kind"] == "turn" and (data := spool_file.read(descriptor, record)) is not None:
                turns[meta["index"], meta["start"], meta["crc32"]] = data
            if meta["kind"] in SESSION_KINDS:
                session_records.append((meta, spool_file.read(descriptor, record)))
    finally:
        os.close(descriptor)
    if assignment is None:
        return None
    return Unfinished(
        first.meta["name"],
        runner_pb2.GroupAssignment.FromString(assignment),
        float(first.meta["monotonic_s"]),
        1 + sum(record.meta["kind"] == "resumed" for record in found.records),
        turns,
        session_records,
    )
