"""Rounding to FP8 with a scale for each block, and products of what was rounded, on any device.

Products are taken in float32, also under autocast: what FP8 numbers with sums in float32 would give, up to the order of
the sums. The backward pass rounds too, and lets the gradient through its own rounding unchanged.

T = tokens, N = output features, K = input features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_SMALLEST_AMAX = 1e-12
"""Of a block: all zeros need a scale, too."""


def rounded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` `[..., R, C]` as FP8 shows it, in float32: a scale for each block of so many rows and columns, or less."""
    *stack, height, width = x.shape
    padded = F.pad(x.float(), (0, -width % columns, 0, -height % rows))
    blocks = padded.view(*stack, padded.shape[-2] // rows, rows, padded.shape[-1] // columns, columns)
    amax = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(_SMALLEST_AMAX)
    scale = (LARGEST / amax.double()).float()
    shown = (blocks * scale).clamp(-LARGEST, LARGEST).to(FP8).float() * (1.0 / scale)
    return shown.view_as(padded)[..., :height, :width]


def rounded_weight(weight_NK: Tensor) -> Tensor:
    """A weight, or a stack of them."""
    return rounded(weight_NK, BLOCK, BLOCK)


def rounded_rows(x_TK: Tensor) -> Tensor:
    """Activations, or gradients of them: blocks lie along what is summed over."""
    return rounded(x_TK, 1, BLOCK)


def rounded_columns(x_TK: Tensor) -> Tensor:
    """The same where the sum is over tokens, in the gradient of a weight."""
    return rounded(x_TK, BLOCK, 1)


class BlockLinear(torch.autograd.Function):
    """`x @ weight.T`, all three products of it with both sides rounded."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return rounded_rows(x_TK) @ rounded_weight(weight_NK).t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_TN = grads[0]
        needs_x, needs_weight = ctx.needs_input_grad
        grad_TK = grad_NK = None
        if needs_x:
            grad_TK = (rounded_rows(grad_TN) @ rounded_weight(weight_NK)).to(x_TK.dtype)
        if needs_weight:
            grad_NK = (rounded_columns(grad_TN).t() @ rounded_columns(x_TK)).to(weight_NK.dtype)
        return grad_TK, grad_NK


def block_linear(x: Tensor, weight_NK: Tensor, shown_NK: Tensor | None = None) -> Tensor:
    """`BlockLinear` over the last dimension of `x`, in the dtype that a linear layer would give here.

    With `shown_NK`, the weight as it is rounded, there is no gradient.
    """
    kind, rows = x.device.type, x.reshape(-1, x.shape[-1])
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        product: Any = BlockLinear.apply(rows, weight_NK) if shown_NK is None else rounded_rows(rows) @ shown_NK.t()
    return product.view(*x.shape[:-1], weight_NK.shape[0]).to(dtype)
