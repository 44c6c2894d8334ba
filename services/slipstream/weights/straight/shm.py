"""Memory of the same host, opened through the file descriptor of whoever has it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import Unreachable
from slipstream.weights.straight.links import Run
from slipstream.weights.straight.memory import HostMemory, Memory


class ShmLender:
    """Offers host memory."""

    def allocate(self, size_bytes: int) -> Memory:
        return HostMemory(size_bytes)

    def offer(self, memory: Memory, size_bytes: int, reader: str) -> broadcast_pb2.BorrowShardResponse:
        assert isinstance(memory, HostMemory)
        shm = broadcast_pb2.ShmMemory(pid=os.getpid(), fd=memory.fd)
        return broadcast_pb2.BorrowShardResponse(size_bytes=size_bytes, shm=shm)

    def close(self) -> None:
        """Memory goes with its copies."""


class ShmReader:
    """Maps what is lent for as long as it takes to copy it: what its owner's death leaves mapped is whole."""

    def read(
        self,
        loan: broadcast_pb2.BorrowShardResponse,
        runs: Sequence[Run],
        target: Tensor,
        reader: str,
        deadline_s: float,
    ) -> None:
        path = f"/proc/{loan.shm.pid}/fd/{loan.shm.fd}"
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise Unreachable(f"the trainer's memory cannot be opened: {error.strerror}", path=path) from error
        try:
            if os.fstat(fd).st_size < loan.size_bytes:
                raise Unreachable("the trainer's memory is another's by now", path=path)
            if target.device.type == "cpu":
                with mmap.mmap(fd, loan.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
                    _copy(mapped, runs, target)
                return
            # torch has no read-only memory: nothing is written to it. It is unmapped with its last tensor.
            own = mmap.mmap(fd, loan.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            source = torch.frombuffer(own, dtype=torch.uint8)
            for run in runs:
                piece = source[run.source : run.source + run.size_bytes]
                target[run.target : run.target + run.size_bytes].copy_(piece)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing stays open."""


def _copy(mapped: mmap.mmap, runs: Sequence[Run], target: Tensor) -> None:
    view = target.numpy()
    with memoryview(mapped) as source:
        for run in runs:
            view[run.target : run.target + run.size_bytes] = source[run.source : run.source + run.size_bytes]
