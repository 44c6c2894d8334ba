"""Whether rows of expert ids can be: every token takes K different experts that exist.

A row of 8 ids in a byte each is one 64-bit word; turned by one lane, two, three and four it stands beside itself with
every pair of lanes aligned, and a lane of zeros in the exclusive or is an id named twice. That is one compiled loop
(numba, without Python's lock), at a sixth of what numpy takes for it column by column. Rows that do not fill words,
and those too few to compile anything for, are numpy's.

N = rows, K = ids of a row, W = words of a row, S = comparisons of two words of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
"""Looked through at once: as much as stays in a core's cache."""
COMPILED_BYTES = 8 << 20
"""From so many bytes on it is worth a second of compiling, once in a process."""


def fault(rows_NK: NDArray[np.unsignedinteger], expert_count: int, compiled_bytes: int = COMPILED_BYTES) -> str | None:
    """What is wrong with rows that lie without gaps between them. Compiled code sees those of `compiled_bytes` on."""
    if not rows_NK.size:
        return None
    clashing = compiled_check() if rows_NK.nbytes >= compiled_bytes and _fills_words(rows_NK) else None
    count = max(8, BLOCK_BYTES // (rows_NK.itemsize * rows_NK.shape[1]) // 8 * 8)
    for start in range(0, len(rows_NK), count):
        block_NK = rows_NK[start : start + count]
        largest = int(block_NK.max())
        if largest >= expert_count:
            return f"they name expert {largest} of {expert_count}"
        if _compared(block_NK) if clashing is None else _turned(block_NK, clashing):
            return "they name an expert twice for one token"
    return None


def _compared(rows_NK: NDArray[np.unsignedinteger]) -> bool:
    """Whether a row holds a value twice, column by column: many times faster than sorting rows."""
    columns_KN = np.ascontiguousarray(rows_NK.T)
    return any(bool(np.equal(columns_KN[shift:], columns_KN[:-shift]).any()) for shift in range(1, len(columns_KN)))


def _fills_words(rows_NK: NDArray[np.unsignedinteger]) -> bool:
    bits = 8 * rows_NK.itemsize * rows_NK.shape[1]
    return rows_NK.shape[1] > 1 and (bits % 64 == 0 or 64 % bits == 0)


def _turned(rows_NK: NDArray[np.unsignedinteger], clashing: Callable[..., Any]) -> bool:
    """Whether a row holds a value twice, for rows of a whole number of words or a whole number of rows a word."""
    lane_bits = 8 * rows_NK.itemsize
    row_bits = lane_bits * rows_NK.shape[1]
    whole = len(rows_NK) - len(rows_NK) % max(1, 64 // row_bits)
    words_NW = np.require(rows_NK[:whole], requirements=["C", "A"]).reshape(-1).view(np.uint64)
    words_WN = np.ascontiguousarray(words_NW.reshape(-1, max(1, row_bits // 64)).T)
    lowest = sum(1 << at for at in range(0, 64, lane_bits))
    comparisons = _comparisons(len(words_WN), lane_bits, min(64, row_bits))
    found = clashing(words_WN, comparisons, np.uint64(lowest), np.uint64(lowest << (lane_bits - 1)))
    return bool(found) or (whole < len(rows_NK) and _compared(rows_NK[whole:]))


@cache
def _comparisons(word_count: int, lane_bits: int, part_bits: int) -> NDArray[np.uint64]:
    """`[S, 6]`: two words of a row, and how the second one turns so that in the end each lane met every other one.

    A turn moves the lanes of each part of a word round: bits to the left, what is kept of that, bits to the right, what
    is kept of that.
    """
    turns = []
    for left in range(0, part_bits, lane_bits):
        low = sum(((1 << left) - 1) << start for start in range(0, 64, part_bits))
        turns.append((left, (1 << 64) - 1 - low, part_bits - left if left else 0, low))
    found = []
    for second in range(word_count):
        found += [(second, second, *turn) for turn in turns[1 : len(turns) // 2 + 1]]
        found += [(first, second, *turn) for first in range(second) for turn in turns]
    return np.array(found, np.uint64)


@cache
def compiled_check() -> Callable[..., Any] | None:
    """The compiled loop, or None without numba. It sees a lane of zeros by the borrow of subtracting one from it.

    The first call takes a second and the compiler's 130 MB, which stay.
    """
    try:
        from numba import njit, types, uint64
    except ImportError:
        return None

    words = types.Array(uint64, 2, "C", readonly=True)  # so that rows that may not be written to are taken as well

    @njit([uint64(words, words, uint64, uint64)], nogil=True)
    def clashing(words_WN: Any, comparisons_S: Any, lowest: Any, highest: Any) -> Any:
        found = np.uint64(0)
        for start in range(0, words_WN.shape[1], 2048):
            end = min(start + 2048, words_WN.shape[1])
            for at in range(len(comparisons_S)):
                first, second, left, kept_left, right, kept_right = comparisons_S[at]
                a_N, b_N = words_WN[first, start:end], words_WN[second, start:end]
                for index in range(len(a_N)):
                    b = b_N[index]
                    lanes = a_N[index] ^ (((b << left) & kept_left) | ((b >> right) & kept_right))
                    found |= (lanes - lowest) & ~lanes
        return found & highest

    return clashing
