"""Memory with the tensors of one version, shared by the process that has them and vLLM's worker.

It has no name in any file system: it is reached through its owner's open file, and gone with its last user, however
that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.tensors import spread
from slipstream.engine.vllm.layout import ITEM_BYTES, Group, Layout


class TensorMemory:
    """Tensors of a layout, as views into one stretch of memory."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        """`memory`: as uint8, on any device."""
        self.layout = layout
        self.memory = memory
        self._tensors: dict[str, Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; valid as long as the arena."""
        if self._tensors is None:
            self._tensors = {name: self._view(p.offset_bytes, p.shape) for name, p in self.layout.places.items()}
        return self._tensors

    def span(self, group: Group) -> Tensor:
        """All tensors of a group as one, without dimensions."""
        places = [self.layout.places[name] for name in group.names]
        return self._view(places[0].offset_bytes, (sum(prod(place.shape) for place in places),))

    def fill(self, tensors: Mapping[str, Any]) -> None:
        """Copy tensors in, in this arena's dtype."""
        views = self.tensors()
        spread(lambda name: views[name].copy_(tensors[name]), list(tensors))

    def _view(self, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
        end = offset_bytes + prod(shape) * ITEM_BYTES[self.layout.dtype]
        return self.memory[offset_bytes:end].view(getattr(torch, self.layout.dtype)).view(shape)


class Arena(TensorMemory):
    """The same in memory that another process of the host has, too."""

    def __init__(self, layout: Layout, path: str | None = None) -> None:
        """New memory, or that of another process."""
        if path is None:
            self._fd = os.memfd_create("slipstream-weights")
            os.ftruncate(self._fd, layout.size_bytes)
        else:
            self._fd = os.open(path, os.O_RDWR)
        super().__init__(layout, torch.frombuffer(mmap.mmap(self._fd, layout.size_bytes), dtype=torch.uint8))
        self._pinned = False

    @property
    def path(self) -> str:
        """What another process opens, while this one keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def pin(self) -> bool:
        """Let the GPU read it at full speed; False where that is not possible."""
        runtime: Any = torch.cuda.cudart()
        self._pinned = int(runtime.cudaHostRegister(self.memory.data_ptr(), self.layout.size_bytes, 0)) == 0
        return self._pinned

    def close(self) -> None:
        """Nobody may use its tensors any more."""
        if self._pinned:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False
        os.close(self._fd)
        self._tensors = None
