"""Receiving into this process's own memory: for engines that take arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import Unsupported
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.receiver import Receiver

_ARRAYS = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}


class HostReceiver:
    """Gives the tensors as arrays, each version's in memory of its own."""

    def __init__(self) -> None:
        self._receiver = Receiver(torch.device("cpu"))

    async def __call__(
        self, manifest: Manifest, loans: Sequence[broadcast_pb2.BorrowShardResponse], reader: str, deadline_s: float
    ) -> dict[str, np.ndarray]:
        return await asyncio.to_thread(self._receive, manifest, loans, reader, deadline_s)

    def _receive(
        self, manifest: Manifest, loans: Sequence[broadcast_pb2.BorrowShardResponse], reader: str, deadline_s: float
    ) -> dict[str, np.ndarray]:
        dtype = _ARRAYS.get(manifest.slices[0].dtype)
        if dtype is None:
            raise Unsupported(f"this engine takes no {manifest.slices[0].dtype}", dtype=manifest.slices[0].dtype)
        places: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        size = 0
        for part in manifest.slices:
            if part.name not in places:
                places[part.name], shapes[part.name] = size, part.global_shape
                size += int(np.prod(part.global_shape)) * dtype.itemsize
        target = torch.empty(size, dtype=torch.uint8)
        self._receiver.receive(manifest, loans, target, places, reader, deadline_s)
        flat = target.numpy().view(dtype)
        tensors = {}
        for name, at in places.items():
            begin = at // dtype.itemsize
            tensors[name] = flat[begin : begin + int(np.prod(shapes[name]))].reshape(shapes[name])
        return tensors
