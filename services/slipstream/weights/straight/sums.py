"""The logical checksums of `weights/checksum.py` in torch, of many slices at once, on whatever device they lie.

Slices of equal size that follow each other, such as the experts of a layer, are summed up together: a model of 18,000
tensors takes some hundred rounds of kernels and one answer from the device. A card sums up by a kernel of our own
(`sums_kernel.py`) as soon as that has given, in this process and on that card, what plain operators give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod

import structlog
import torch
from torch import Tensor

from slipstream.common.errors import Unsupported, WeightsCorrupt
from slipstream.weights.checksum import GAMMA, MASK, MIX_1, MIX_2, seed_of
from slipstream.weights.manifest import ITEM_BYTES, WeightSlice

log = structlog.get_logger()

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements summed up at once: temporaries take 8 bytes each, and stay in the cache of a CPU."""
_BITS = {2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}
_TRIED = ((3, 1), (2, 70_001), (1, 1 << 20))
"""Rows and elements that a kernel has to sum up as plain operators do before it is used."""

RowSums = Callable[[Tensor, int, Tensor], Tensor]
"""Sums of rows of elements; what their elements' bits are; and what the weight of each row's first one comes of."""


def first_element(part: WeightSlice) -> int:
    """Where a slice of whole rows begins in its tensor. Raises `Unsupported` for any other box."""
    if part.whole or not part.shape:
        return 0
    if part.shape[1:] != part.global_shape[1:]:
        raise Unsupported(f"{part.name} is cut through its rows", slice=part.name)
    return part.offsets[0] * prod(part.global_shape[1:])


@torch.no_grad()
def slice_sums(slices: Sequence[WeightSlice], offsets: Sequence[int], data: Tensor) -> list[int]:
    """The sum of each slice, whose bytes begin at its offset in `data`."""
    if not slices:
        return []
    width = ITEM_BYTES[slices[0].dtype]
    dtype, mask = _BITS[width]
    row_sums = _row_sums(data.device)
    bases = [_signed(seed_of(part.name) + (first_element(part) + 1) * GAMMA) for part in slices]
    bases_S = torch.tensor(bases, dtype=torch.int64).to(data.device)
    sums = []
    for first, last in _alike(slices, offsets):
        size = prod(slices[first].shape)
        begin = offsets[first]
        bits = data[begin : begin + (last - first) * size * width].view(dtype).view(last - first, size)
        sums.append(row_sums(bits, mask, bases_S[first:last]))
    return [total & MASK for total in torch.cat(sums).tolist()]


def check_sums(slices: Sequence[WeightSlice], offsets: Sequence[int], data: Tensor) -> None:
    """Raise `WeightsCorrupt` for the first slice whose bytes are not what the manifest says."""
    for part, total in zip(slices, slice_sums(slices, offsets, data), strict=True):
        if total != part.checksum:
            raise WeightsCorrupt(f"checksum of {part.name} differs", slice=part.name)


def _alike(slices: Sequence[WeightSlice], offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of slices of one size, each beginning where the one before ends."""
    first = 0
    for at in range(1, len(slices) + 1):
        follows = (
            at < len(slices)
            and slices[at].size_bytes == slices[first].size_bytes
            and offsets[at] == offsets[at - 1] + slices[at - 1].size_bytes
        )
        if not follows:
            yield first, at
            first = at


@cache
def _row_sums(device: torch.device) -> RowSums:
    """What sums up fastest there."""
    if device.type != "cuda":
        return plain_row_sums
    try:
        from slipstream.weights.straight.sums_kernel import row_sums  # loads the compiler

        with torch.cuda.device(device):
            if all(alike(row_sums, *tried, width, device) for tried in _TRIED for width in _BITS):
                return row_sums
        log.warning("sums_without_kernel", device=str(device), detail="its sums are not those of plain operators")
    except Exception as error:  # the compiler's, of many classes
        detail = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("sums_without_kernel", device=str(device), detail=detail)
    return plain_row_sums


def alike(row_sums: RowSums, rows: int, size: int, width: int, device: torch.device) -> bool:
    """Whether sums of any bits are those of plain operators."""
    dtype, mask = _BITS[width]
    generator = torch.Generator(device).manual_seed(size)  # the global one is the trainer's
    shape = (rows, size * width)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator).view(dtype)
    bases = torch.tensor([_signed(seed_of(str(row)) + GAMMA) for row in range(rows)], device=device)
    return bool(torch.equal(row_sums(bits, mask, bases), plain_row_sums(bits, mask, bases)))


def plain_row_sums(bits_NE: Tensor, mask: int, bases_N: Tensor) -> Tensor:
    """Of each row of elements, the first of which has the weight that its base gives."""
    rows, size = bits_NE.shape
    limit = _CHUNK.get(bits_NE.device.type, _CHUNK["cpu"])
    if size <= limit:
        steps_E = _steps(0, size, bits_NE.device)
        step = max(limit // max(size, 1), 1)
        parts = [_block(bits_NE[at : at + step], mask, bases_N[at : at + step], steps_E) for at in range(0, rows, step)]
        return torch.cat(parts)
    total_N = torch.zeros_like(bases_N)
    for at in range(0, size, limit):
        steps_E = _steps(at, min(at + limit, size), bits_NE.device)
        for row in range(rows):
            total_N[row] += _block(bits_NE[row : row + 1, at : at + limit], mask, bases_N[row : row + 1], steps_E)[0]
    return total_N


def _steps(first: int, last: int, device: torch.device) -> Tensor:
    return torch.arange(first, last, dtype=torch.int64, device=device) * _signed(GAMMA)


def _block(bits_NE: Tensor, mask: int, bases_N: Tensor, steps_E: Tensor) -> Tensor:
    """As `checksum._run_sum`; torch's integers wrap as unsigned ones do, but for shifts to the right."""
    weights = bases_N[:, None] + steps_E
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        weights ^= (weights >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            weights *= _signed(factor)
    weights |= 1
    values = bits_NE.to(torch.int64).bitwise_and_(mask).add_(1 << 32)
    return values.mul_(weights).sum(1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
