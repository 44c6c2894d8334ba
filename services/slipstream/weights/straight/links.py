"""What a way to read weights consists of: the lender's end, the reader's end, and which stretches are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.weights.manifest import ITEM_BYTES, WeightSlice
from slipstream.weights.straight.memory import Memory
from slipstream.weights.straight.sums import first_element


class LenderLink(Protocol):
    """The trainer's end."""

    def allocate(self, size_bytes: int) -> Memory:
        """Memory that weights are packed into, and read from."""
        ...

    def offer(self, memory: Memory, size_bytes: int, reader: str) -> broadcast_pb2.BorrowShardResponse:
        """What a reader needs to read so many bytes of it. Begins to send them, where reading is receiving."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Run:
    """Bytes that follow each other on both sides."""

    source: int
    target: int
    size_bytes: int


class ReaderLink(Protocol):
    """The engine's end, in the process that has the target."""

    def read(
        self,
        loan: broadcast_pb2.BorrowShardResponse,
        runs: Sequence[Run],
        target: Tensor,
        reader: str,
        deadline_s: float,
    ) -> None:
        """Fill all runs. Raises `Unreachable`, or `DeadlineExceeded` at the deadline of `time.monotonic`."""
        ...

    def close(self) -> None: ...


def target_offsets(slices: Sequence[WeightSlice], places: Mapping[str, int]) -> list[int]:
    """Where each slice goes, if its tensor begins at its place."""
    return [places[part.name] + first_element(part) * ITEM_BYTES[part.dtype] for part in slices]


def runs_of(slices: Sequence[WeightSlice], targets: Sequence[int]) -> list[Run]:
    """Slices that lie back to back at the source, as few stretches as that gives at the target."""
    runs: list[Run] = []
    at = begin = goes = end = 0
    for part, target in zip(slices, targets, strict=True):  # of 18,000: nothing is made for each
        if target != end:
            if at > begin:
                runs.append(Run(begin, goes, at - begin))
            begin, goes = at, target
        at += part.size_bytes
        end = target + part.size_bytes
    if at > begin:
        runs.append(Run(begin, goes, at - begin))
    return runs
