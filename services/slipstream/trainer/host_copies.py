"""Copies of weights in this process's memory, for publishing: later steps leave them be.

From a card they go into page-locked memory, on a stream of their own beside the next step's passes: before weights
change again, the card waits for them (`hold`). Page-locking is slow, so there are two sets of buffers, used in turn:
copies hold until the export after the next. The trainer publishes version n before it exports n + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Memory = Literal["fresh", "reused", "page_locked"]


class Copying:
    """Copies that are being made."""

    def __init__(self, arrays: dict[str, NDArray[np.float32]], made: Any = None) -> None:
        self._arrays = arrays
        self._made = made
        self.size_bytes = sum(array.nbytes for array in arrays.values())

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """All of them, once they are made. Any thread may wait."""
        if self._made is not None:
            self._made.synchronize()
        return self._arrays


class HostCopies:
    """Float32 copies of tensors that have the same names and shapes each time."""

    def __init__(self, device: torch.device, memory: Memory | None = None) -> None:
        """`memory`: unset takes page-locked buffers for a card, and fresh memory each time on a CPU."""
        self._memory = memory or ("page_locked" if device.type == "cuda" else "fresh")
        self._sets: tuple[dict[str, _Buffer], dict[str, _Buffer]] = ({}, {})
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._made: Any = None

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor]) -> Copying:
        """Copy all of them as they are now. Nobody writes to them before `hold`."""
        if self._memory == "fresh":
            return Copying({name: tensor.detach().float().cpu().numpy().copy() for name, tensor in tensors.items()})
        buffers, other = self._sets[1], self._sets[0]
        self._sets = (buffers, other)
        pieces = _pieces(tensors)
        for name, (source, _) in pieces.items():
            if name not in buffers:
                locked = self._memory == "page_locked"
                buffers[name] = _Buffer(torch.empty(source.shape, dtype=torch.float32, pin_memory=locked))
        if self._stream is None:
            for name, (source, _) in pieces.items():
                buffers[name].memory.copy_(source)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                for name, (source, _) in pieces.items():
                    buffers[name].memory.copy_(source, non_blocking=True)
                    source.record_stream(self._stream)  # one that was made for this is let go of before it is read
                self._made = self._stream.record_event()
        arrays: dict[str, NDArray[np.float32]] = {}
        for piece, (_, cuts) in pieces.items():
            arrays |= buffers[piece].arrays(cuts)
        return Copying({name: arrays[name] for name in tensors}, self._made)

    def hold(self) -> None:
        """Let what is asked of the card from now on wait for the copies begun so far."""
        if self._made is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._made)


Cuts = Mapping[str, tuple[int, torch.Size]]
"""Start and shape of each tensor in a copy, by name."""


class _Buffer:
    """Memory of one piece, and what it is cut into: of 37,000 adapters that takes longer than to copy them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._cuts: Cuts = {}
        self._arrays: dict[str, NDArray[np.float32]] = {}

    def arrays(self, cuts: Cuts) -> dict[str, NDArray[np.float32]]:
        if cuts != self._cuts:
            flat = self.memory.view(-1).numpy()
            self._cuts = cuts
            self._arrays = {name: flat[at : at + shape.numel()].reshape(shape) for name, (at, shape) in cuts.items()}
        return self._arrays


def _pieces(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Cuts]]:
    """What to copy, by the name of the first tensor in it, and how to cut the copy into tensors by name.

    Slices of one tensor that make up all of it (experts) are copied together: a card takes a thousand copies at once,
    and who asks for more has to wait.
    """
    of_memory: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        of_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    pieces: dict[str, tuple[Tensor, Cuts]] = {}
    for names in of_memory.values():
        first = tensors[names[0]].detach()
        whole = first.untyped_storage().nbytes() // first.itemsize
        alike = all(tensors[name].is_contiguous() and tensors[name].dtype == first.dtype for name in names)
        if len(names) > 1 and alike and sum(tensors[name].numel() for name in names) == whole:
            cuts = {name: (int(tensors[name].storage_offset()), tensors[name].shape) for name in names}
            pieces[names[0]] = first.as_strided((whole,), (1,), 0), cuts
        else:
            pieces |= {name: (tensors[name].detach(), {name: (0, tensors[name].shape)}) for name in names}
    return pieces
