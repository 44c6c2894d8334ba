"""What weights must be before an engine is touched: whole, of the model's names and shapes, and all of them numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from slipstream.common.errors import WeightsCorrupt

MEMORY_THREADS = 8
"""One thread reads some 5 GB/s, a socket's memory many times that."""

Result = TypeVar("Result")


def check_tensors(tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors (torch or numpy) as torch's; raises `WeightsCorrupt` on the first thing that is wrong with them."""
    if tensors.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        raise WeightsCorrupt(
            f"the weights do not match the model: missing {missing[:3]}, unexpected {extra[:3]}",
            slice=(missing + extra)[0],
        )
    return spread(lambda name: _checked(name, tensors[name], expected[name]), list(tensors))


def spread(work: Callable[[str], Result], names: Sequence[str], threads: int | None = None) -> dict[str, Result]:
    """What some work on each tensor gives, on as many threads as memory is worth: torch lets go of the GIL.

    The first error in the order of the threads is raised, once all threads are done.
    """
    threads = threads or max(min(MEMORY_THREADS, (os.cpu_count() or 1) // 2), 1)
    if threads == 1:
        return {name: work(name) for name in names}
    with ThreadPoolExecutor(threads) as pool:
        parts = [pool.submit(lambda part: [work(name) for name in part], names[at::threads]) for at in range(threads)]
        found: dict[str, Result] = {}
        for at, part in enumerate(parts):
            found.update(zip(names[at::threads], part.result(), strict=True))
    return {name: found[name] for name in names}


def _checked(name: str, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = value.detach() if isinstance(value, torch.Tensor) else _from_numpy(value)
    if tuple(tensor.shape) != shape:
        raise WeightsCorrupt(f"{name} has shape {tuple(tensor.shape)}, expected {shape}", slice=name)
    if not tensor.is_floating_point():
        raise WeightsCorrupt(f"{name} has dtype {tensor.dtype}", slice=name)
    # A sum is finite only if all it is made of is; where it is not, it may just have been too large.
    if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        raise WeightsCorrupt(f"{name} holds values that are no numbers", slice=name)
    return tensor


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    if not array.flags.writeable:  # torch warns about read-only memory, though it is only read
        array = array.copy()
    return torch.from_numpy(array)
