"""The task sequence: what is run at each position, a pure function of (seed, position)."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Fractional part of the golden ratio: multiples of it spread evenly over [0, 1), so that every window of
# positions, however short, holds the environments in nearly the proportion of their weights.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an environment's task set."""

    environment: str
    split: str
    index: int


@dataclass(frozen=True, slots=True)
class MixtureEntry:
    """One environment of the mixture."""

    name: str
    weight: float
    train_task_count: int


class TaskSequence:
    """Maps positions to tasks. Two processes with the same seed and mixture agree on every position."""

    def __init__(self, seed: int, entries: Sequence[MixtureEntry]) -> None:
        self.seed = seed
        self._entries = list(entries)
        total = sum(entry.weight for entry in entries)
        self._edges = list(accumulate(entry.weight / total for entry in entries))
        self._offset = _hash(f"{seed}/mixture") / 2**64

    def environment_of(self, position: int) -> str:
        """Return the environment of a position."""
        return self._entry(position).name

    def task(self, position: int) -> Task:
        """Return the training task of a position."""
        entry = self._entry(position)
        return Task(entry.name, "train", self.candidate(position, 0)[0])

    def candidate(self, position: int, number: int) -> tuple[int, float]:
        """Return a task index that a position might have, the first being its own, and a draw from [0, 1)."""
        entry = self._entry(position)
        suffix = f"/{number}" if number else ""
        index = _hash(f"{self.seed}/task/{position}{suffix}") % entry.train_task_count
        return index, _hash(f"{self.seed}/draw/{position}/{number}") / 2**64

    def sampling_seed(self, group_id: str, attempt: int) -> int:
        """Return the seed of an attempt's sampling, below 2^31."""
        return _hash(f"{self.seed}/sampling/{group_id}/{attempt}") >> 33

    def _entry(self, position: int) -> MixtureEntry:
        place = (self._offset + position * _GOLDEN) % 1.0
        return self._entries[min(bisect_right(self._edges, place), len(self._entries) - 1)]


def evaluation_tasks(environment: str, count: int) -> list[Task]:
    """Return the held-out tasks of an evaluation: always the first `count` of the set."""
    return [Task(environment, "held_out", index) for index in range(count)]


def group_id_of(position: int) -> str:
    """Name the group of a position."""
    return f"train-{position}"


def position_of(group_id: str) -> int | None:
    """Return the position of a training group's name."""
    kind, _, number = group_id.partition("-")
    return int(number) if kind == "train" and number.isdecimal() else None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
