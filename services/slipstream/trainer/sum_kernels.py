"""Sums of gradients on a card: what comes in bfloat16 is added to float32 as it is read.

Plain operators make it float32 in memory first, or read both with loads that look at the dtype of each number.
"""

# ruff: noqa: ANN001, ANN202 - the compiler reads annotations of kernels as their types

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Numbers that one program adds."""


@triton.jit
def _add(total, part, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(total + places, mask=inside, other=0.0)
    value += tl.load(part + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + places, value, mask=inside)


def add(total: Tensor, part: Tensor) -> None:
    """`total += part`; both lie in one piece."""
    if count := total.numel():
        launch: Any = _add[(triton.cdiv(count, BLOCK),)]
        launch(total, part, count, BLOCK=BLOCK, num_warps=8)
