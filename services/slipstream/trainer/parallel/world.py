"""This process among the trainer's ranks: who it is, and the sums and agreements that are not gradients.

    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.rank_count)
    world = World(layout)
    total = world.sum(torch.tensor([loss]))

A `World()` of one rank needs no process group: its collectives are the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.models.light_import import light_imports
from slipstream.trainer.parallel.board import Board
from slipstream.trainer.parallel.layout import Layout
from slipstream.trainer.parallel.roll import Roll
from slipstream.trainer.parallel.watch import CardWatch

with light_imports():
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.parallel_dims import ParallelDims


class World:
    """All ranks, and the place of this one."""

    def __init__(
        self,
        layout: Layout | None = None,
        roll: Roll | None = None,
        board: Board | None = None,
        device: torch.device | None = None,
    ) -> None:
        layout = layout or Layout()
        self.layout = layout
        self.device = device or torch.device("cpu")
        """Where this rank computes. What is no part of the model goes between ranks on their CPUs in any case."""
        self.roll = roll
        self._watch = CardWatch(roll) if roll is not None and self.device.type == "cuda" else None
        self._board = board
        self.dims = None if layout.rank_count == 1 else _meshes(layout, self.device.type)
        self.rank = 0 if self.dims is None else dist.get_rank()
        self.data_rank, self.context_rank = layout.coordinate(self.rank)
        context = None if self.dims is None else self.dims.get_optional_mesh("cp")
        self.context_group = None if context is None else context.get_group()
        self._place = 0

    @property
    def alone(self) -> bool:
        return self.dims is None

    @property
    def board(self) -> Board:
        """Where ranks leave words for each other; a rank alone has none."""
        assert self._board is not None
        return self._board

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise `RankLost` where a collective inside fails."""
        watch = self._watch or self.roll
        with nullcontext() if watch is None else watch.watching():
            yield

    def check(self) -> None:
        """Raise `RankLost` for a rank that gives no sign any more."""
        if self.roll is not None:
            self.roll.check()

    def arrive(self) -> None:
        """Say that this rank has come to its next collectives."""
        self._place += 1
        if self.roll is not None:
            self.roll.arrive(self._place)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks what rank 0 has in these tensors."""
        for tensor in [] if self.alone else tensors:
            dist.broadcast(tensor, 0)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return bool(self.least(int(yes)))

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        self.arrive()
        return int(self.smallest(torch.tensor(number)))

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def smallest(self, values: Tensor) -> Tensor:
        """Over all ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def largest_of_context(self, values: Tensor) -> Tensor:
        """Over the ranks that share this one's micro-batches."""
        if self.context_group is None:
            return values
        largest = values.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.context_group)
        return largest

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of each rank at rank 0, nothing elsewhere."""
        if self.alone:
            return [data]
        sizes = self.sum(torch.eye(self.layout.rank_count, dtype=torch.int64)[self.rank] * len(data)).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, parts, dst=0)
        return [part[:size].numpy().tobytes() for part, size in zip(parts or [], sizes, strict=False)]

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.alone:
            return values
        reduced = values.clone()
        dist.all_reduce(reduced, how)
        return reduced


def _meshes(layout: Layout, device_type: str) -> ParallelDims:
    parallel_dims.device_type = device_type  # a name that torchtitan took from what it found when it was imported
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=layout.data,
        cp=layout.context,
        tp=1,
        pp=1,
        ep=layout.expert,
        world_size=layout.rank_count,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims
