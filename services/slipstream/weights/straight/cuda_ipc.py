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
from slipstream.weights.straight.memory import Memory

POLL_S = 0.0002
MAX_OPEN = 32
"""Allocations of others that a reader keeps mapped; opening one takes milliseconds."""


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
        self._open: dict[tuple[int, bytes], int] = {}

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
            address = self._address(loan.cuda_ipc.pid, loan.cuda_ipc.handle)
            for run in runs:
                copy_async(target, run.target, address + run.source, run.size_bytes, self._stream)
        except DriverError as error:
            raise Unreachable(f"the trainer's card cannot be read: {error}") from error
        while not self._stream.query():
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded("the weights were not copied in time")
            time.sleep(POLL_S)

    def close(self) -> None:
        bind(self._device)
        self._stream.synchronize()
        for address in self._open.values():
            close_handle(address)
        self._open.clear()

    def _address(self, pid: int, handle: bytes) -> int:
        key = (pid, handle)
        if key not in self._open:
            gone = [each for each in self._open if not os.path.exists(f"/proc/{each[0]}")]
            while len(self._open) - len(gone) >= MAX_OPEN:
                gone.append(next(each for each in self._open if each not in gone))
            for each in gone:
                close_handle(self._open.pop(each))
            self._open[key] = open_handle(handle)
        return self._open[key]
