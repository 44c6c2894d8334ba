"""The attention node of every model: it leaves to the context who sees whom.

Attention that knows only causality is PyTorch's `scaled_dot_product_attention` with `is_causal`. On a card that is a
fused kernel (cuDNN's or flash attention in half precision, the memory-efficient one in float32): scores of all pairs
are nowhere. Packed documents on a card in half precision take flash attention for ragged sequences, without padding
(`ragged_causal`). The choice is by device and dtype alone; it is not measured on a card.

T = tokens, B = sequences, L = padded length, N = query heads, G = key and value heads, H = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.base import Context
from slipstream.models.titan import Module


class ContextAttention(Module):
    """torchtitan's `inner_attention`, whose `attention_masks` is a `Context`, or None for a plain batch `[B, L]`.

    In a plain batch padding must be on the right, where causality hides it.
    """

    layer: int
    """Its place among the attention layers, from 0; set by whoever builds the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """No options."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLGH: Tensor,
        v_BLGH: Tensor,
        *,
        attention_masks: Context | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention output in the layout of `q_BLNH`."""
        if attention_masks is None:
            return causal(q_BLNH, k_BLGH, v_BLGH, scale)
        return attention_masks.attend(self.layer, q_BLNH, k_BLGH, v_BLGH, scale)


GROUPED_ON: set[str] = set()
"""Devices whose fused kernels of half precision are given key and value heads as they are, not repeated."""


def causal(q_BLNH: Tensor, k_BLGH: Tensor, v_BLGH: Tensor, scale: float | None) -> Tensor:
    """Causal attention; key and value heads are repeated for the query heads that share them."""
    repeats = q_BLNH.shape[2] // k_BLGH.shape[2]
    grouped = repeats > 1 and q_BLNH.device.type in GROUPED_ON and q_BLNH.dtype in (torch.bfloat16, torch.float16)
    if repeats > 1 and not grouped:
        k_BLGH, v_BLGH = k_BLGH.repeat_interleave(repeats, 2), v_BLGH.repeat_interleave(repeats, 2)
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLGH, v_BLGH))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


MAX_RAGGED_HEAD_DIM = 256
"""Of flash attention."""


def takes_ragged(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `ragged_causal` can compute this."""
    return device.type != "cpu" and dtype in (torch.bfloat16, torch.float16) and head_dim <= MAX_RAGGED_HEAD_DIM


def ragged_causal(
    q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, starts: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Causal attention within documents laid end to end.

    `starts`: int32 `[documents + 1]`, where each begins, and the end; `longest`: tokens of the longest one.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads the compiler: seconds, for a card only

    out = varlen_attn(
        q_TNH,
        k_TGH,
        v_TGH,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # nothing behind a token, everything before it
        enable_gqa=q_TNH.shape[1] != k_TGH.shape[1],
        num_splits=1,  # otherwise the other documents decide in which order a document's sums are taken
    )
    assert isinstance(out, Tensor), "only return_aux gives more"
    return out
