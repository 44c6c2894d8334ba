"""The sums of `sums.py` on a card, in one pass: plain operators move 300 bytes for each element that they sum up."""

# ruff: noqa: ANN001, ANN202 - the compiler reads annotations of kernels as their types

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.weights.checksum import GAMMA, MIX_1, MIX_2

BLOCK = 1024
"""Elements of a row that are looked at together."""
TURNS = 16
"""Blocks that one program sums up."""


@triton.jit
def _sum_up(
    bits,
    bases,
    partial_sums,
    size,
    programs,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // programs).to(tl.int64)  # more elements than an int32 counts
    begin = (program % programs).to(tl.int64) * (BLOCK * TURNS)
    base = tl.load(bases + row).to(tl.uint64)
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    for turn in range(TURNS):
        at = begin + turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        value = (tl.load(bits + row * size + at, mask=inside, other=0).to(tl.int64) & MASK) + 4294967296
        weight = at.to(tl.uint64) * GAMMA + base
        weight = (weight ^ (weight >> 30)) * MIX_1
        weight = (weight ^ (weight >> 27)) * MIX_2
        weight = (weight ^ (weight >> 31)) | 1
        product = value.to(tl.uint64) * weight
        total += tl.where(inside, product, tl.zeros_like(product))
    tl.store(partial_sums + program, tl.sum(total.to(tl.int64), 0))


def row_sums(bits_NE: Tensor, mask: int, bases_N: Tensor) -> Tensor:
    """Of each row of elements that lie back to back, the first of which has the weight that its base gives."""
    rows, size = bits_NE.shape
    assert bits_NE.is_contiguous()
    assert bases_N.is_contiguous()
    programs = max(triton.cdiv(size, BLOCK * TURNS), 1)
    partial_sums = torch.empty(rows * programs, dtype=torch.int64, device=bits_NE.device)
    launch: Any = _sum_up[(rows * programs,)]
    constants = {"GAMMA": GAMMA, "MIX_1": MIX_1, "MIX_2": MIX_2, "MASK": mask, "BLOCK": BLOCK, "TURNS": TURNS}
    with torch.cuda.device_of(bits_NE):
        launch(bits_NE, bases_N, partial_sums, size, programs, **constants)
    return partial_sums.view(rows, programs).sum(1)
