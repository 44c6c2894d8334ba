"""Memory that another process can read: of this host, or of a card."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Bytes that are lent."""

    @property
    def data(self) -> Tensor:
        """All of them, as uint8."""
        ...

    def close(self) -> None:
        """Nobody uses it any more."""
        ...


class HostMemory:
    """Memory of this host without a name in any file system: gone with its last user, however that ends."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("slipstream-published")
        os.ftruncate(self.fd, size_bytes)
        self.data = torch.frombuffer(mmap.mmap(self.fd, size_bytes), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self.fd)
        self.data = torch.empty(0, dtype=torch.uint8)


class DeviceMemory:
    """Memory that this process alone reads, on any device."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.data = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
