"""Activations in host memory until the backward pass needs them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

MIN_BYTES = 1 << 20
"""Smaller tensors stay: moving them costs more than it saves."""


class ActivationOffload:
    """Moves what autograd saves, but not the weights, which stay where they are anyhow."""

    def __init__(self, *, enabled: bool, min_bytes: int = MIN_BYTES) -> None:
        self._enabled = enabled
        self._min_bytes = min_bytes
        self.moved_bytes = 0
        """Since the start."""

    def forward(self) -> AbstractContextManager[Any]:
        """To be open during a forward pass."""
        if not self._enabled:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        whole = tensor if tensor._base is None else tensor._base  # a product saves its weight transposed
        if tensor.nbytes < self._min_bytes or isinstance(whole, nn.Parameter):
            return tensor.device, tensor
        self.moved_bytes += tensor.nbytes
        card = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=card)
        # On the same stream as what made the tensor and as its return: neither overtakes the other.
        return tensor.device, host.copy_(tensor.detach(), non_blocking=card)

    @staticmethod
    def _unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
