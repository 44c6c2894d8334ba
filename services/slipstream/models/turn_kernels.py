"""Norm and rotary embedding of queries or keys on a card: one pass forward, one backward, sums in float32.

In plain operators rows become float32 for the norm, are turned there in half a dozen passes, and become bfloat16 again
for attention: a tenth of a micro-batch of 16k tokens.

R = rows, a token's heads one after another; H = head size, of which two halves turn against each other.
"""

# ruff: noqa: ANN001, ANN202 - the compiler reads annotations of kernels as their types

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""That one program takes."""


@triton.jit
def _rows(
    x, table, positions, rows, eps, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Where a program's rows lie, which there are, cosines and sines, both halves, and what norms them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = (row < rows)[:, None]
    place = tl.load(positions + row // HEADS, mask=row < rows, other=0)
    angles = table + place[:, None] * (4 * HALF) + column[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + 2 * HALF, mask=inside, other=0.0)
    spots = row[:, None] * (2 * HALF) + column[None, :]
    one = tl.load(x + spots, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(x + spots + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(one * one + two * two, 1) / (2 * HALF) + eps)
    return spots, inside, cos, sin, one, two, scale


@triton.jit
def _turn(
    x, weight, table, positions, out, rows, eps, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    spots, inside, cos, sin, one, two, scale = _rows(x, table, positions, rows, eps, HEADS, HALF, ROWS)
    column = tl.arange(0, HALF)
    one = one * scale[:, None] * tl.load(weight + column).to(x.dtype.element_ty).to(tl.float32)[None, :]
    two = two * scale[:, None] * tl.load(weight + HALF + column).to(x.dtype.element_ty).to(tl.float32)[None, :]
    tl.store(out + spots, (one * cos - two * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + spots + HALF, (two * cos + one * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_back(
    x, weight, table, positions, grads, x_grads, weight_grads, rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    spots, inside, cos, sin, one, two, scale = _rows(x, table, positions, rows, eps, HEADS, HALF, ROWS)
    column = tl.arange(0, HALF)
    one = one * scale[:, None]  # without the weight
    two = two * scale[:, None]
    grad_one = tl.load(grads + spots, mask=inside, other=0.0).to(tl.float32)
    grad_two = tl.load(grads + spots + HALF, mask=inside, other=0.0).to(tl.float32)
    back_one = grad_one * cos + grad_two * sin
    back_two = grad_two * cos - grad_one * sin
    sums = weight_grads + tl.program_id(0).to(tl.int64) * (2 * HALF) + column
    tl.store(sums, tl.sum(back_one * one, 0))
    tl.store(sums + HALF, tl.sum(back_two * two, 0))
    back_one = back_one * tl.load(weight + column).to(x.dtype.element_ty).to(tl.float32)[None, :]
    back_two = back_two * tl.load(weight + HALF + column).to(x.dtype.element_ty).to(tl.float32)[None, :]
    along = tl.sum(back_one * one + back_two * two, 1) / (2 * HALF)
    x_grad_one = (back_one - one * along[:, None]) * scale[:, None]
    x_grad_two = (back_two - two * along[:, None]) * scale[:, None]
    tl.store(x_grads + spots, x_grad_one.to(x_grads.dtype.element_ty), mask=inside)
    tl.store(x_grads + spots + HALF, x_grad_two.to(x_grads.dtype.element_ty), mask=inside)


def turn(x_BLNH: Tensor, weight_H: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    """Normed and turned; everything lies in one piece. `table` is that of `rope.py`, `positions` one a token."""
    out_BLNH = torch.empty_like(x_BLNH)
    heads, size = x_BLNH.shape[-2:]
    if rows := x_BLNH.numel() // size:
        launch: Any = _turn[(triton.cdiv(rows, ROWS),)]
        launch(x_BLNH, weight_H, table, positions, out_BLNH, rows, eps, HEADS=heads, HALF=size // 2, ROWS=ROWS)
    return out_BLNH


def turn_back(
    x_BLNH: Tensor, weight_H: Tensor, table: Tensor, positions: Tensor, eps: float, grad_BLNH: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and of the weight, in float32, of `turn` with those."""
    x_grad_BLNH = torch.empty_like(x_BLNH)
    heads, size = x_BLNH.shape[-2:]
    rows = x_BLNH.numel() // size
    programs = triton.cdiv(rows, ROWS)
    sums = torch.empty(programs, size, dtype=torch.float32, device=x_BLNH.device)
    if rows:
        launch: Any = _turn_back[(programs,)]
        launch(
            *(x_BLNH, weight_H, table, positions, grad_BLNH, x_grad_BLNH, sums, rows, eps),
            HEADS=heads, HALF=size // 2, ROWS=ROWS,
        )  # fmt: skip
    return x_grad_BLNH, sums.sum(0)
