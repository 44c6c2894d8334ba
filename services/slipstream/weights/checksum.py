"""Order-free 64-bit sum over the elements of a logical slice, in Hugging Face names and coordinates.

    sum over elements of (value bits + 2**32) * (splitmix64(name hash + linear coordinate) | 1)   mod 2**64

It depends on where an element lies in the *whole* tensor, not on how the tensor is cut: the sums of disjoint slices add
up to the tensor's, in any order. A weight is odd, so one changed element always changes the sum; two swapped ones do
but for a chance of about 2**-32 or less. It guards against mistakes and bit errors, not against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_CHUNK_ELEMENTS = 1 << 15
"""Elements hashed together: the temporaries stay in the cache."""

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_STEPS = np.arange(_CHUNK_ELEMENTS, dtype=np.uint64) * _GAMMA
_MARK = np.uint64(1 << 32)
_BITS = {2: np.uint16, 4: np.uint32}


def slice_checksum(name: str, values: np.ndarray, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The sum of the box `values` that begins at `offsets` of the tensor `name` of `global_shape`.

    Elements of two or four bytes, taken as they lie in memory (little-endian).
    """
    seed = seed_of(name)
    if tuple(values.shape) == tuple(global_shape):
        return _run_sum(seed, 0, _bits(values))
    if values.ndim == 0 or values.size == 0:
        return 0
    # A box is a set of runs along the last dimension, each contiguous in the whole tensor.
    strides = [1] * len(global_shape)
    for axis in range(len(global_shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * global_shape[axis + 1]
    if tuple(values.shape[1:]) == tuple(global_shape[1:]):  # whole rows: one run
        return _run_sum(seed, offsets[0] * strides[0], _bits(values))
    rows = _bits(values).reshape(-1, values.shape[-1])
    total = 0
    for row, index in zip(rows, np.ndindex(*values.shape[:-1]), strict=True):
        start = sum((i + o) * s for i, o, s in zip((*index, 0), offsets, strides, strict=True))
        total += _run_sum(seed, start, row)
    return total & MASK


def seed_of(name: str) -> int:
    """What the weights of a tensor's elements begin from."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def tensor_checksum(name: str, values: np.ndarray) -> int:
    """The sum of a whole tensor."""
    return slice_checksum(name, values, values.shape, (0,) * values.ndim)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(_BITS[values.dtype.itemsize])


def _run_sum(seed: int, start: int, bits: np.ndarray) -> int:
    """Sum over elements that follow each other in the whole tensor, the first at linear coordinate `start`."""
    total = 0
    for at in range(0, bits.size, _CHUNK_ELEMENTS):
        chunk = bits[at : at + _CHUNK_ELEMENTS]
        base = np.uint64((seed + (start + at + 1) * GAMMA) & MASK)
        weights = _STEPS[: chunk.size] + base
        scratch = weights >> np.uint64(30)
        weights ^= scratch
        weights *= _MIX_1
        np.right_shift(weights, np.uint64(27), out=scratch)
        weights ^= scratch
        weights *= _MIX_2
        np.right_shift(weights, np.uint64(31), out=scratch)
        weights ^= scratch
        weights |= np.uint64(1)
        np.add(chunk, _MARK, out=scratch, casting="unsafe", dtype=np.uint64)
        weights *= scratch
        total += int(weights.sum(dtype=np.uint64))
    return total & MASK
