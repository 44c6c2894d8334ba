"""Rows of experts: how they are gathered, gated and added up, and the gradients of that.

On a card kernels of our own do each in one pass (`expert_kernels.py`).

T = tokens, K = experts a token, N = T*K routed rows, D = width, F = hidden width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FUSED_ON = {"cuda"}
"""Devices that have the kernels."""


class GatherRows(torch.autograd.Function):
    """Rows of `x` by `index_N`; the gradient is gathered too: `inverse_TK` says where each row of `x` went.

    Every row of `x` must be taken exactly K times (`inverse_TK` is `[T, K]`).
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, index_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        return x_TD.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (inverse_TK,) = ctx.saved_tensors
        if inverse_TK.shape[1] > 1 and grads[0].device.type in FUSED_ON:
            from slipstream.models import expert_kernels  # loads the compiler

            return expert_kernels.add_up(grads[0].contiguous(), inverse_TK, None, grads[0].dtype), None, None
        rows_ND = grads[0].index_select(0, inverse_TK.reshape(-1))
        if inverse_TK.shape[1] == 1:
            return rows_ND, None, None
        return rows_ND.view(*inverse_TK.shape, rows_ND.shape[-1]).sum(1), None, None


class AddUp(torch.autograd.Function):
    """A token's rows times their scores, added up: one pass forward, one backward. `places_TK` says where they are."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, places_TK: Tensor, scores_TK: Tensor, dtype: torch.dtype) -> Tensor:
        from slipstream.models import expert_kernels

        rows_ND, scores_TK = rows_ND.contiguous(), scores_TK.contiguous()
        ctx.save_for_backward(rows_ND, places_TK, scores_TK)
        return expert_kernels.add_up(rows_ND, places_TK, scores_TK, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor, None]:
        from slipstream.models import expert_kernels

        rows_ND, places_TK, scores_TK = ctx.saved_tensors
        row_grads_ND, score_grads_TK = expert_kernels.take_apart(rows_ND, places_TK, scores_TK, grads[0].contiguous())
        return row_grads_ND, None, score_grads_TK, None


class Gated(torch.autograd.Function):
    """`silu(gate) * up`, rounded once."""

    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        from slipstream.models import expert_kernels

        gate_NF, up_NF = gate_NF.contiguous(), up_NF.contiguous()
        ctx.save_for_backward(gate_NF, up_NF)
        return expert_kernels.gate(gate_NF, up_NF)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        from slipstream.models import expert_kernels

        gate_NF, up_NF = ctx.saved_tensors
        return expert_kernels.turn_gate(gate_NF, up_NF, grads[0].contiguous())


def gated(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """`silu(gate) * up`, by a kernel where there is one."""
    if gate_NF.device.type in FUSED_ON:
        out: Any = Gated.apply(gate_NF, up_NF)
        return out
    return F.silu(gate_NF) * up_NF


def add_up(rows_ND: Tensor, places_TK: Tensor, scores_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """A token's rows times their scores, added up, on a device that has the kernels."""
    out: Any = AddUp.apply(rows_ND, places_TK, scores_TK, dtype)
    return out
