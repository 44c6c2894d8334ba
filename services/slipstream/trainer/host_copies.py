"""Copies of weights in this process's memory, for publishing: later steps leave them be.

From a card they go into page-locked memory, all at once and waited for once: one after another into memory that the
kernel may move, the link to the card would mostly stand idle. Page-locking is slow, so there are two sets of buffers,
used in turn: copies hold until the export after the next. The trainer publishes version n before it exports n + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Memory = Literal["fresh", "reused", "page_locked"]


class HostCopies:
    """Float32 copies of tensors that have the same names and shapes each time."""

    def __init__(self, device: torch.device, memory: Memory | None = None) -> None:
        """`memory`: unset takes page-locked buffers for a card, and fresh memory each time on a CPU."""
        self._device = device
        self._memory = memory or ("page_locked" if device.type == "cuda" else "fresh")
        self._sets: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
        """Copies of all of them."""
        if self._memory == "fresh":
            return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in tensors.items()}
        buffers, other = self._sets[1], self._sets[0]
        self._sets = (buffers, other)
        for name, tensor in tensors.items():
            if name not in buffers:
                locked = self._memory == "page_locked"
                buffers[name] = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=locked)
            buffers[name].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {name: buffers[name].numpy() for name in tensors}
