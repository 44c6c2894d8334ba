"""What a rank of the trainer needs to publish straight: copies, the link that reads them, and their address."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.common.config import ConfigError
from slipstream.common.version import PolicyVersion
from slipstream.weights.config import WeightsConfig
from slipstream.weights.manifest import WeightSlice
from slipstream.weights.straight.copies import KeptCopies
from slipstream.weights.straight.links import LenderLink
from slipstream.weights.straight.packing import TensorBox, pack

_LINKS: Mapping[str, tuple[str, str]] = {
    "shm": ("shm", "ShmLender"),
    "cuda_ipc": ("cuda_ipc", "CudaIpcLender"),
    "nccl": ("collective", "CollectiveLender"),
    "nixl": ("nixl", "NixlLender"),
}


@dataclass(frozen=True)
class KeptShard:
    """A rank's part of a version that is kept for readers."""

    slices: tuple[WeightSlice, ...]
    source: str

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.slices)


class Lender:
    """Owns the copies of one rank. `keep` is called on the torch thread, the rest on the loop."""

    def __init__(self, config: WeightsConfig, device: torch.device, address: str) -> None:
        """`address`: where readers ask for loans. Raises `ConfigError` where the transport cannot work."""
        if config.transport == "cuda_ipc" and device.type != "cuda":
            raise ConfigError(f"weights.transport is 'cuda_ipc', and the trainer computes on {device.type!r}")
        if config.transport == "nccl" and config.backend not in ("auto", "nccl" if device.type == "cuda" else "gloo"):
            raise ConfigError(
                f"weights.backend is {config.backend!r}, and the trainer computes on {device.type!r}: "
                "nccl sends from cards alone, gloo from none"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._config = config
        self._address = address
        self.link = make_link(config, device)
        self.copies = KeptCopies(self.link.allocate, config.keep_versions, config.lease_s)

    def keep(self, version: PolicyVersion, boxes: Sequence[TensorBox]) -> KeptShard:
        """Copy weights where readers find them; returns what is published of them."""
        slices = pack(self.copies, version, boxes, self._config.dtype)
        return KeptShard(slices, f"{self._config.transport}://{self._address}")

    def close(self) -> None:
        self.link.close()
        self.copies.close()


def make_link(config: WeightsConfig, device: torch.device) -> LenderLink:
    """The trainer's end of a transport."""
    module, name = _LINKS[config.transport]
    try:
        made: Any = getattr(importlib.import_module(f"slipstream.weights.straight.{module}"), name)
    except ImportError as error:
        raise ConfigError(f"weights.transport is {config.transport!r}, which needs {error.name}") from error
    if config.transport == "shm":
        return made()
    if config.transport == "nccl":
        return made(device, config.link_host, config.backend, config.lease_s)
    return made(device)
