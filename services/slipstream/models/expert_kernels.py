"""What experts need beside their products, on a card: each kernel reads its rows once, and keeps sums in float32.

In plain operators a token's experts are gathered, multiplied by float32 scores and added up, each time as rows of
float32 in memory, forward and backward: a sixth of a step of a mixture of experts with 1B of 5B parameters active.

T = tokens, K = experts a token, N = T*K routed rows, D = width, F = hidden width of an expert.
"""

# ruff: noqa: ANN001, ANN202 - the compiler reads annotations of kernels as their types

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns of a row, or numbers of a flat tensor, that are looked at together."""


@triton.jit
def _add_up(rows, places, scores, out, width, K: tl.constexpr, HAS_SCORES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)  # rows times width may be more than an int32 counts
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(K):
        row = tl.load(places + token * K + k)
        values = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCORES:
            values = values * tl.load(scores + token * K + k).to(tl.float32)
        total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _take_apart(rows, places, scores, grads, row_grads, score_grads, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for k in range(K):
        row = tl.load(places + token * K + k)
        score = tl.load(scores + token * K + k).to(tl.float32)
        total = 0.0
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < width
            grad = tl.load(grads + token * width + columns, mask=inside, other=0.0).to(tl.float32)
            values = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
            total = total + tl.sum(grad * values, 0)  # pyright: ignore[reportOperatorIssue]
            part = (score * grad).to(row_grads.dtype.element_ty)
            tl.store(row_grads + row * width + columns, part, mask=inside)
        tl.store(score_grads + token * K + k, total)


@triton.jit
def _gate(gates, ups, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    gate = tl.load(gates + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + places, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_gate(gates, ups, grads, gate_grads, up_grads, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    gate = tl.load(gates + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + places, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grads + places, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    slope = share * (1.0 + gate * (1.0 - share))
    tl.store(gate_grads + places, (grad * up * slope).to(gate_grads.dtype.element_ty), mask=inside)
    tl.store(up_grads + places, (grad * gate * share).to(up_grads.dtype.element_ty), mask=inside)


def _blocked(width: int) -> int:
    """A power of 2 that holds a row, or `BLOCK`."""
    return min(BLOCK, triton.next_power_of_2(width))


def add_up(rows_ND: Tensor, places_TK: Tensor, scores_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum `[T, D]` of each token's rows, times scores where there are any; `places_TK` says where they are."""
    (tokens, top_k), width = places_TK.shape, rows_ND.shape[1]
    out_TD = torch.empty(tokens, width, dtype=dtype, device=rows_ND.device)
    if tokens:
        block = _blocked(width)
        launch: Any = _add_up[(tokens, triton.cdiv(width, block))]
        scores = places_TK if scores_TK is None else scores_TK
        launch(
            *(rows_ND, places_TK, scores, out_TD, width), K=top_k, HAS_SCORES=scores_TK is not None, BLOCK=block,
            num_warps=8 if block >= 1024 else 4,
        )  # fmt: skip
    return out_TD


def take_apart(rows_ND: Tensor, places_TK: Tensor, scores_TK: Tensor, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and of scores, of `add_up` with those."""
    (tokens, top_k), width = places_TK.shape, rows_ND.shape[1]
    row_grads_ND, score_grads_TK = torch.empty_like(rows_ND), torch.empty_like(scores_TK)
    if tokens:
        block = _blocked(width)
        launch: Any = _take_apart[(tokens,)]
        launch(
            *(rows_ND, places_TK, scores_TK, grad_TD, row_grads_ND, score_grads_TK, width), K=top_k, BLOCK=block,
            num_warps=8 if block >= 1024 else 4,
        )  # fmt: skip
    return row_grads_ND, score_grads_TK


def gate(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    out_NF = torch.empty_like(gate_NF)
    if count := out_NF.numel():
        launch: Any = _gate[(triton.cdiv(count, BLOCK),)]
        launch(gate_NF, up_NF, out_NF, count, BLOCK=BLOCK, num_warps=8)
    return out_NF


def turn_gate(gate_NF: Tensor, up_NF: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both, of `gate`."""
    gate_grads_NF, up_grads_NF = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    if count := gate_NF.numel():
        launch: Any = _turn_gate[(triton.cdiv(count, BLOCK),)]
        launch(gate_NF, up_NF, grad_NF, gate_grads_NF, up_grads_NF, count, BLOCK=BLOCK, num_warps=8)
    return gate_grads_NF, up_grads_NF
