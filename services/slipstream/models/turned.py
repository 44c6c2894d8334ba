"""Queries and keys normed and turned in one pass, where torchtitan's attention does so one after the other.

    for module in model.modules():
        turn_at_once(module)        # attention with norms of queries and keys, of bfloat16: by a kernel

Off until it has been seen to work on a card: `FUSED_ON.add("cuda")`, before `turn_at_once`, switches it on. What
attention takes is then bfloat16, as it rounds it in any case; between norm and rotation all is float32.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.rope import Rope

FUSED_ON: set[str] = set()
"""Devices that take the kernels."""


class Turned(torch.autograd.Function):
    """An RMS norm of each head, then its rotation."""

    @staticmethod
    def forward(ctx: Any, x_BLNH: Tensor, weight_H: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
        from slipstream.models import turn_kernels  # loads the compiler

        x_BLNH, positions = x_BLNH.contiguous(), positions.contiguous()
        ctx.save_for_backward(x_BLNH, weight_H, table, positions)
        ctx.eps = eps
        return turn_kernels.turn(x_BLNH, weight_H, table, positions, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        from slipstream.models import turn_kernels

        x_BLNH, weight_H, table, positions = ctx.saved_tensors
        grad_BLNH = grads[0].contiguous()
        x_grad_BLNH, weight_grad_H = turn_kernels.turn_back(x_BLNH, weight_H, table, positions, ctx.eps, grad_BLNH)
        return x_grad_BLNH, weight_grad_H.to(weight_H.dtype), None, None, None


def turn_at_once(attention: nn.Module) -> None:
    """Let an attention module do so, where any device takes the kernels. Any other module is left as it is."""
    if not FUSED_ON:
        return
    rope, norms = getattr(attention, "rope", None), [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    alike = all(isinstance(norm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None for norm in norms)
    if hasattr(attention, "qkv_linear") and isinstance(rope, Rope) and not rope.config.interleaved and alike:
        attention.forward = MethodType(_attend, attention)


def _attend(attention: Any, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
    """torchtitan's `GQAttention.forward`, in which the kernels take the place of norms and rotation."""
    q_BLNH, k_BLGH, v_BLGH = attention.qkv_linear(x_BLD)
    if positions is not None and _takes(q_BLNH, positions):
        q_norm, k_norm, table = attention.q_norm, attention.k_norm, attention.rope.cache
        q_BLNH = Turned.apply(q_BLNH, q_norm.weight, table, positions, q_norm.eps)
        k_BLGH = Turned.apply(k_BLGH, k_norm.weight, table, positions, k_norm.eps)
    else:
        q_BLNH, k_BLGH = attention.rope(attention.q_norm(q_BLNH), attention.k_norm(k_BLGH), positions)
    out_BLNH = attention.inner_attention(
        q_BLNH,
        k_BLGH,
        v_BLGH,
        attention_masks=attention_masks,
        scale=attention.scaling,
        enable_gqa=attention.enable_gqa,
    )
    return attention.wo(out_BLNH.contiguous().flatten(2))


def _takes(q_BLNH: Tensor, positions: Tensor) -> bool:
    """Whether the kernels take these queries: a position for each token, and halves of a size that they have."""
    half, rest = divmod(q_BLNH.shape[-1], 2)
    whole = positions.shape == q_BLNH.shape[:2] and not rest and half & (half - 1) == 0 and half >= 16
    return whole and q_BLNH.device.type in FUSED_ON and q_BLNH.dtype in (torch.bfloat16, torch.float16)
