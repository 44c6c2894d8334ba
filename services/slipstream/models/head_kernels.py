"""What `head.py` needs of logits, on a card: each reads them once, in their own dtype, and keeps sums in float32.

In plain operators a chunk of logits is made, read and written a dozen times, in float32: a tenth of a step at a
vocabulary of 151k.

C = rows, V = vocabulary.
"""

# ruff: noqa: ANN001, ANN202 - the compiler reads annotations of kernels as their types

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a row that are looked at together."""


@triton.jit
def _read(logits, targets, factors, logps, sums, entropies, vocab_size, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 16k rows of 151k logits are more than an int32 counts
    start = logits + row * vocab_size
    factor = 1.0
    if HAS_FACTORS:
        factor = tl.load(factors + row)
    highest = -float("inf")
    total = 0.0  # of exp(z - highest)
    weighted = 0.0  # of z exp(z - highest)
    for first in range(0, vocab_size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < vocab_size
        z = tl.load(start + places, mask=inside, other=-float("inf")).to(tl.float32) * factor
        higher = tl.maximum(highest, tl.max(z, 0))
        shrink = tl.exp(highest - higher)
        p = tl.exp(z - higher)
        total = total * shrink + tl.sum(p, 0)
        weighted = weighted * shrink + tl.sum(p * tl.where(inside, z, 0.0), 0)
        highest = higher
    log_sum = highest + tl.log(total)
    target = tl.load(start + tl.load(targets + row)).to(tl.float32) * factor
    tl.store(logps + row, target - log_sum)
    tl.store(sums + row, log_sum)
    tl.store(entropies + row, log_sum - weighted / total)


@triton.jit
def _turn(logits, targets, factors, sums, grads, vocab_size, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = logits + row * vocab_size
    factor = 1.0
    if HAS_FACTORS:
        factor = tl.load(factors + row)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < vocab_size
    z = tl.load(start + places, mask=inside, other=0.0).to(tl.float32) * factor
    here = (places == tl.load(targets + row)).to(tl.float32)
    grad = (here - tl.exp(z - tl.load(sums + row))) * (tl.load(grads + row) * factor)
    tl.store(start + places, grad.to(logits.dtype.element_ty), mask=inside)


def read(logits_CV: Tensor, targets_C: Tensor, factor_C: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, the logarithm of the sum of exponentials, and the entropy, of each row.

    `factor_C`: what logits are multiplied by first, one over the temperature.
    """
    rows, vocab_size = logits_CV.shape
    made = [torch.empty(rows, dtype=torch.float32, device=logits_CV.device) for _ in range(3)]
    logp_C, sum_C, entropy_C = made
    if rows:
        launch: Any = _read[(rows,)]
        launch(
            *(logits_CV, targets_C, factor_C if factor_C is not None else sum_C, logp_C, sum_C, entropy_C, vocab_size),
            HAS_FACTORS=factor_C is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return logp_C, sum_C, entropy_C


def turn_into_gradient(
    logits_CV: Tensor, targets_C: Tensor, factor_C: Tensor | None, sum_C: Tensor, grad_C: Tensor
) -> Tensor:
    """The gradient of logits, in their place, for one of log-probabilities; `sum_C` is what `read` said."""
    rows, vocab_size = logits_CV.shape
    if rows:
        launch: Any = _turn[(rows, triton.cdiv(vocab_size, BLOCK))]
        launch(
            *(logits_CV, targets_C, factor_C if factor_C is not None else sum_C, sum_C, grad_C, vocab_size),
            HAS_FACTORS=factor_C is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return logits_CV
