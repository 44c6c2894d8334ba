"""Reading a version into memory of this process, and the proof that it is the one that was published."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import Unsupported, WeightsCorrupt
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.aside import Aside
from slipstream.weights.straight.links import ReaderLink, Run, runs_of, target_offsets
from slipstream.weights.straight.sums import check_sums

_READERS = {
    "shm": ("shm", "ShmReader"),
    "cuda_ipc": ("cuda_ipc", "CudaIpcReader"),
    "link": ("collective", "CollectiveReader"),
    "nixl": ("nixl", "NixlReader"),
}
"""By the member of `BorrowShardResponse.memory`."""
_FINITE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Figures:
    """What it took."""

    transfer_s: float
    check_s: float


class Receiver:
    """Reads into one device's memory; keeps what readers have opened for the next version."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[str, ReaderLink] = {}
        self._aside = Aside(device)

    @torch.no_grad()
    def receive(
        self,
        manifest: Manifest,
        loans: Sequence[broadcast_pb2.BorrowShardResponse],
        target: Tensor,
        places: Mapping[str, int],
        reader: str,
        deadline_s: float,
    ) -> Figures:
        """Fill `target`, each tensor from its place on. Raises `WeightsCorrupt` if it is not as published."""
        began_s = time.monotonic()
        offsets: list[int] = []
        for (source, slices), loan in zip(manifest.parts(), loans, strict=True):
            targets = target_offsets(slices, places)
            if loan.size_bytes != sum(part.size_bytes for part in slices):
                raise WeightsCorrupt(f"{source.address} lends {loan.size_bytes} bytes", version=manifest.version)
            runs = runs_of(slices, targets)
            _check_inside(runs, target, manifest)
            self._reader(loan).read(loan, runs, target, reader, deadline_s)
            offsets += targets
        read_s = time.monotonic()
        with self._aside.entered():
            check_sums(manifest.slices, offsets, target)
            _check_finite(target, manifest)
        return Figures(read_s - began_s, time.monotonic() - read_s)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _reader(self, loan: broadcast_pb2.BorrowShardResponse) -> ReaderLink:
        kind = loan.WhichOneof("memory") or ""
        if kind not in _READERS:
            raise Unsupported("weights are lent in a way that is not known here", transport=kind)
        if kind not in self._readers:
            module, name = _READERS[kind]
            found = getattr(importlib.import_module(f"slipstream.weights.straight.{module}"), name)
            self._readers[kind] = found(self._device) if kind != "shm" else found()
        return self._readers[kind]


def _check_inside(runs: Sequence[Run], target: Tensor, manifest: Manifest) -> None:
    """Memory of a card is written by its address: nobody else finds that it ends before."""
    if any(run.target < 0 or run.target + run.size_bytes > target.numel() for run in runs):
        raise WeightsCorrupt(f"{manifest.version} does not fit the memory for it", version=manifest.version)


def _check_finite(target: Tensor, manifest: Manifest) -> None:
    values = target.view(getattr(torch, manifest.slices[0].dtype))
    bad = torch.zeros((), dtype=torch.bool, device=target.device)
    for at in range(0, values.numel(), _FINITE_ELEMENTS):
        bad |= ~torch.isfinite(values[at : at + _FINITE_ELEMENTS].sum(dtype=torch.float64))
    if bool(bad):
        raise WeightsCorrupt("the weights hold values that are not finite", version=manifest.version)
