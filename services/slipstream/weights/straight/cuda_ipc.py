"""Memory of a card of the same host, mapped into the reader's process and copied from card to card."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import DeadlineExceeded, Unreachable
from slipstream.weights.straight.cuda_driver import (
    DriverError,
    DriverMemory,
    bind,
    close_handle,
    copy_async,
    open_handle,
)
from slipstream.weights.straight.links import Run
from slipstream.weights.straight.mappings import Mappings
from slipstream.weights.straight.memory import Memory

POLL_S = 0.0002


class CudaIpcLender:
    """Offers memory of a card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, size_bytes: int) -> Memory:
        return DriverMemory(size_bytes, self._device)

    def offer(self, memory: Memory, size_bytes: int, reader: str) -> broadcast_pb2.BorrowShardResponse:
        assert isinstance(memory, DriverMemory)
        shared = broadcast_pb2.CudaIpcMemory(handle=memory.handle, pid=os.getpid())
        return broadcast_pb2.BorrowShardResponse(size_bytes=size_bytes, cuda_ipc=shared)

    def close(self) -> None:
        """Memory goes with its copies."""


class CudaIpcReader:
    """Copies on a stream of its own, in as few pieces as there are runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._mappings = Mappings(open_handle, self._unmap)

    def read(
        self,
        loan: broadcast_pb2.BorrowShardResponse,
        runs: Sequence[Run],
        target: Tensor,
        reader: str,
        deadline_s: float,
    ) -> None:
        bind(self._device)
        try:
            with self._mappings.address(loan.cuda_ipc.pid, loan.cuda_ipc.handle) as address:
                for run in runs:
                    copy_async(target, run.target, address + run.source, run.size_bytes, self._stream)
                while not self._stream.query():
                    if time.monotonic() > deadline_s:
                        raise DeadlineExceeded("the weights were not copied in time")
                    time.sleep(POLL_S)
        except DriverError as error:
            raise Unreachable(f"the trainer's card cannot be read: {error}") from error

    def close(self) -> None:
        self._mappings.close()

    def _unmap(self, address: int) -> None:
        bind(self._device)
        self._stream.synchronize()  # a copy that was given up may still go on
        close_handle(address)
