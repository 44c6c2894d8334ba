"""The output head: logits, or log-probabilities of targets without ever holding the logits of all rows.

At a context of 16k and a vocabulary of 151k the logits of one sequence are 10 GB in float32, their gradient as much
again. `target_logps` keeps those of `chunk_rows` rows at a time, and computes them once more for the gradient, as a
linear layer's share of a step is small; it keeps one number a row. On a card logits stay in the dtype of the products,
kernels of our own read them (`head_kernels.py`), and where all rows fit they are kept for the gradient.

R = rows, C = rows of a chunk, D = width, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.titan import Linear

FUSED_ON = {"cuda"}
"""Devices whose logits the kernels read."""


class Head(Linear):
    """torchtitan's linear layer, which also gives log-probabilities: in its own call, where FSDP gathers weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as torchtitan's."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,
        targets_R: Tensor | None = None,
        temperature_R: Tensor | None = None,
        chunk_rows: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of `[..., D]`; with targets, their log-probabilities and the entropies, `[R]` each, of `[R, D]`."""
        if targets_R is None:
            return super().forward(input)
        assert self.bias is None, "no family's head has one"
        return chunked_logps(input, self.weight, targets_R, temperature_R, chunk_rows)


def target_logps(logits_RV: Tensor, targets_R: Tensor, temperature_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and, without gradient, the entropy of each distribution, at temperatures."""
    logits_RV = logits_RV.float()
    if temperature_R is not None:
        logits_RV = logits_RV / temperature_R.unsqueeze(1)
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    with torch.no_grad():
        entropy_R = -(logp_RV.exp() * logp_RV).sum(-1)
    return logp_RV.gather(-1, targets_R.unsqueeze(-1)).squeeze(-1), entropy_R


def chunked_logps(
    hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature_R: Tensor | None, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """What `target_logps` says of `hidden_RD @ weight_VD.T`, with the logits of at most `chunk_rows` rows at once.

    0, or no fewer than there are rows, takes all of them, and keeps their logits for the gradient.
    """
    kind = hidden_RD.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # as a linear layer would
        dtype = torch.get_autocast_dtype(kind)
        hidden_RD, weight_VD = hidden_RD.to(dtype), weight_VD.to(dtype)
    if kind in FUSED_ON:
        fused: Any = FusedLogps.apply(hidden_RD, weight_VD, targets_R, temperature_R, chunk_rows)
        return fused
    if not chunk_rows or chunk_rows >= len(hidden_RD):
        return target_logps(F.linear(hidden_RD, weight_VD), targets_R, temperature_R)
    return _ChunkedLogps.apply(hidden_RD, weight_VD, targets_R, temperature_R, chunk_rows)


class FusedLogps(torch.autograd.Function):
    """`_ChunkedLogps` with kernels, which read and write logits as they are: in bfloat16 in half the bytes."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature_R: Tensor | None, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        from slipstream.models.head_kernels import read  # loads the compiler

        count = len(hidden_RD)
        chunk_rows = min(count, chunk_rows * 4 // weight_VD.itemsize or count) or 1
        factor_R = None if temperature_R is None else 1.0 / temperature_R.float()
        made, logits_CV = [], None
        for rows in _chunks(count, chunk_rows):
            logits_CV = F.linear(hidden_RD[rows], weight_VD)
            made.append(read(logits_CV, targets_R[rows], None if factor_R is None else factor_R[rows]))
        parts = zip(*made, strict=True) if made else [[torch.zeros(0, device=hidden_RD.device)]] * 3
        logp_R, sum_R, entropy_R = (torch.cat(list(part)) for part in parts)
        kept = logits_CV if chunk_rows >= count else None
        ctx.save_for_backward(hidden_RD, weight_VD, targets_R, factor_R, sum_R, kept)
        ctx.chunk_rows = chunk_rows
        ctx.mark_non_differentiable(entropy_R)
        return logp_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
        from slipstream.models.head_kernels import turn_into_gradient

        hidden_RD, weight_VD, targets_R, factor_R, sum_R, kept = ctx.saved_tensors
        grad_R, weight_learns = grads[0].float().contiguous(), ctx.needs_input_grad[1]
        hidden_grad_RD = torch.empty_like(hidden_RD)
        weight_grad_VD: Tensor | None = None
        for rows in _chunks(len(hidden_RD), ctx.chunk_rows):
            logits_CV = F.linear(hidden_RD[rows], weight_VD) if kept is None else kept
            factor_C = None if factor_R is None else factor_R[rows]
            grad_CV = turn_into_gradient(logits_CV, targets_R[rows], factor_C, sum_R[rows], grad_R[rows])
            torch.mm(grad_CV, weight_VD, out=hidden_grad_RD[rows])
            if weight_learns:
                part_VD = torch.mm(grad_CV.t(), hidden_RD[rows])
                if weight_grad_VD is None:
                    weight_grad_VD = part_VD if kept is not None else part_VD.float()
                else:
                    weight_grad_VD.add_(part_VD)
        if weight_learns and weight_grad_VD is None:
            weight_grad_VD = torch.zeros_like(weight_VD)
        return hidden_grad_RD, None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype), None, None, None


def _chunks(count: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, count, chunk_rows)]


class _ChunkedLogps(torch.autograd.Function):
    """With `z` the logits at temperature and `g` the gradient of a row's log-probability, that of `z` is
    `g (onehot - softmax(z))`: a chunk's logits are all it takes."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature_R: Tensor | None, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        logps, entropies = [], []
        for start in range(0, len(hidden_RD), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits_CV = F.linear(hidden_RD[rows], weight_VD)
            temperature_C = None if temperature_R is None else temperature_R[rows]
            logp_C, entropy_C = target_logps(logits_CV, targets_R[rows], temperature_C)
            logps.append(logp_C)
            entropies.append(entropy_C)
        ctx.save_for_backward(hidden_RD, weight_VD, targets_R, temperature_R)
        ctx.chunk_rows = chunk_rows
        entropy_R = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_R)
        return torch.cat(logps), entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_RD, weight_VD, targets_R, temperature_R = ctx.saved_tensors
        grad_R = grads[0]
        hidden_grad_RD = torch.empty_like(hidden_RD)
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(hidden_RD), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            scores_CV = F.linear(hidden_RD[rows], weight_VD).float()
            scale_C1 = grad_R[rows].float().unsqueeze(1)
            if temperature_R is not None:
                scores_CV.div_(temperature_R[rows].unsqueeze(1))
                scale_C1 = scale_C1 / temperature_R[rows].unsqueeze(1)
            scores_CV = torch.softmax(scores_CV, dim=-1).neg_()
            targets_C1 = targets_R[rows].unsqueeze(1)
            scores_CV.scatter_add_(1, targets_C1, torch.ones_like(targets_C1, dtype=torch.float32))
            grad_CV = scores_CV.mul_(scale_C1).to(weight_VD.dtype)
            torch.mm(grad_CV, weight_VD, out=hidden_grad_RD[rows])
            if weight_VD.dtype == torch.float32:
                weight_grad_VD.addmm_(grad_CV.t(), hidden_RD[rows])
            else:  # products in the weight's dtype, sums over chunks in float32
                weight_grad_VD.add_(torch.mm(grad_CV.t(), hidden_RD[rows]))
        return hidden_grad_RD, weight_grad_VD.to(weight_VD.dtype), None, None, None
