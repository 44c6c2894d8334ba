"""Packed documents: the trainer's context.

`Documents` describes sequences laid end to end in one row of tokens `[1, T]`: every layer but attention then works on
real tokens alone, and attention spreads them into a padded batch, where each document sees itself only. On a card, in
half precision, it takes them as they lie (`attention.py`) where their lengths differ so much that this is faster.

T = packed tokens, B = documents, L = longest document, N = heads, H = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.attention import causal, ragged_causal, takes_ragged

PADDED_SPEED = 1.8
"""Of cuDNN's kernel, which takes a padded batch, by that of flash attention for ragged documents: on an H200 a document
of 16k tokens took 127 and 240 ms in 20 layers, forward and backward."""


@dataclass(frozen=True)
class Documents:
    """Where the tokens of packed documents lie; pass it as the model's `attention_masks`."""

    shape: tuple[int, int]
    """Documents and longest length: the padded batch."""

    positions_1T: Tensor
    """Position of each token in its document: the model's `positions`."""

    token_of_slot: Tensor
    """`[B*L]`: index of the token in each padded slot; slots of padding repeat token 0."""

    slot_of_token_T: Tensor
    """`[T]`: index of each token's padded slot."""

    padding_slots: Tensor
    """Indices of slots that hold no token."""

    starts: Tensor
    """Int32 `[B + 1]`: index of each document's first token, and T."""

    padded_work: float
    """Pairs of tokens that attention computes in the padded batch, by those in documents: 1 where all are as long."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | None = None) -> Documents:
        """Documents of these lengths, in order."""
        lengths_B = torch.tensor(lengths, dtype=torch.int64)
        longest = int(lengths_B.max())
        slots_BL = torch.arange(longest).expand(len(lengths), longest)
        real_BL = slots_BL < lengths_B[:, None]
        slot_of_token_T = real_BL.reshape(-1).nonzero().squeeze(1)
        token_of_slot = torch.zeros(len(lengths) * longest, dtype=torch.int64)
        token_of_slot[slot_of_token_T] = torch.arange(slot_of_token_T.numel())
        documents = cls(
            shape=(len(lengths), longest),
            positions_1T=slots_BL[real_BL].unsqueeze(0),
            token_of_slot=token_of_slot,
            slot_of_token_T=slot_of_token_T,
            padding_slots=(~real_BL).reshape(-1).nonzero().squeeze(1),
            starts=F.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32),
            padded_work=len(lengths) * longest**2 / max(1, sum(length**2 for length in lengths)),
        )
        return documents if device is None else documents.to(device)

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def attend(self, layer: int, q_1TNH: Tensor, k_1TGH: Tensor, v_1TGH: Tensor, scale: float | None) -> Tensor:
        """Causal attention within each document; all layers alike."""
        if self.shape[0] == 1 and not q_1TNH.is_meta:  # there `causal` would hold the scores of all pairs
            return causal(q_1TNH, k_1TGH, v_1TGH, scale)  # no padding; on a card faster than the kernel of ragged ones
        padded = self.padded_work < PADDED_SPEED and not q_1TNH.is_meta
        if takes_ragged(q_1TNH.device, q_1TNH.dtype, q_1TNH.shape[-1]) and not padded:
            return ragged_causal(q_1TNH[0], k_1TGH[0], v_1TGH[0], self.starts, self.shape[1], scale).unsqueeze(0)
        q, k, v = (_Spread.apply(x[0], self).view(*self.shape, *x.shape[2:]) for x in (q_1TNH, k_1TGH, v_1TGH))
        out = causal(q, k, v, scale)
        return _Collect.apply(out.flatten(0, 1), self).unsqueeze(0)


class _Spread(torch.autograd.Function):
    """Packed rows into padded slots. Padding takes copies of token 0, whose gradient must not count them."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return x_T.index_select(0, documents.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.documents.slot_of_token_T), None


class _Collect(torch.autograd.Function):
    """Padded slots back into packed rows; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, x_slots: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return x_slots.index_select(0, documents.slot_of_token_T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad_slots = grads[0].index_select(0, ctx.documents.token_of_slot)
        grad_slots[ctx.documents.padding_slots] = 0.0
        return grad_slots, None
