"""Weights into a kept copy, on the device where they are: one stretch, in the dtype of the wire, and the sums of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from slipstream.common.version import PolicyVersion
from slipstream.weights.manifest import ITEM_BYTES, WeightSlice
from slipstream.weights.straight.copies import KeptCopies
from slipstream.weights.straight.sums import slice_sums


@dataclass(frozen=True)
class TensorBox:
    """A part of one tensor, in Hugging Face names and coordinates, on any device."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


@torch.no_grad()
def pack(copies: KeptCopies, version: PolicyVersion, boxes: Sequence[TensorBox], dtype: str) -> tuple[WeightSlice, ...]:
    """Keep a version in the order given; returns its slices. Waits for readers of the version that makes room."""
    width = ITEM_BYTES[dtype]
    sizes = [prod(box.values.shape) * width for box in boxes]
    copy = copies.begin(version, sum(sizes))
    data, slices, offsets, at = copy.memory.data, [], [], 0
    for box, size_bytes in zip(boxes, sizes, strict=True):
        shape = tuple(box.values.shape)
        target = data[at : at + size_bytes].view(getattr(torch, dtype)).view(shape)
        target.copy_(box.values.detach(), non_blocking=True)
        slices.append(WeightSlice(box.name, box.global_shape, box.offsets, shape, dtype, size_bytes, 0, 0))
        offsets.append(at)
        at += size_bytes
    if data.device.type == "cuda" or any(box.values.device.type == "cuda" for box in boxes):
        torch.cuda.synchronize()  # readers are other processes: nothing orders them after these copies
    sums = slice_sums(slices, offsets, data)
    described = tuple(replace(part, checksum=total) for part, total in zip(slices, sums, strict=True))
    copies.keep(copy, version, described)
    return described
