"""A version that is a low-rank adapter: what it is added to, and the weights that come of it.

The trainer publishes the first version of an incarnation whole, with the adapter beside the weights it is added to, and
then adapters alone. Whoever serves them keeps the base in memory, adds, and so has a version like any other: whole
weights, whose checksums are of what was added up here, and the trainer's probe, which says whether that is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.errors import WeightsCorrupt
from slipstream.common.version import PolicyVersion

if TYPE_CHECKING:
    from slipstream.weights.manifest import Manifest

PREFIX = "base_model.model."
"""Of the names of an adapter's tensors, as PEFT has them."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Adapter:
    """What a manifest says of an adapter."""

    name: str
    """Never used again: it ends in the version."""
    base_version: PolicyVersion
    """Whose weights it is added to; its own, if they come with it."""
    rank: int
    alpha: float

    @classmethod
    def from_proto(cls, message: broadcast_pb2.Adapter) -> Adapter:
        return cls(message.name, PolicyVersion.from_proto(message.base_version), message.rank, message.alpha)

    def to_proto(self) -> broadcast_pb2.Adapter:
        return broadcast_pb2.Adapter(
            name=self.name, base_version=self.base_version.to_proto(), rank=self.rank, alpha=self.alpha
        )


def adapter_name(run: str, version: PolicyVersion) -> str:
    """The name of a version's adapter, which no other version's can have."""
    return f"{run}{name_end(version)}"


def name_end(version: PolicyVersion) -> str:
    return f"-{version.incarnation}-{version.step}"


def is_base(name: str) -> bool:
    """Whether a tensor belongs to the weights that an adapter is added to."""
    return not name.startswith(PREFIX)


def base_part(manifest: Manifest) -> Manifest:
    """What a whole version's manifest says of the weights alone."""
    return replace(manifest, slices=tuple(part for part in manifest.slices if is_base(part.name)), adapter=None)


def merge(
    manifest: Manifest, tensors: Mapping[str, np.ndarray], base: Manifest, weights: Mapping[str, np.ndarray]
) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The version as whole weights: those of `base` that nothing is added to are shared with `weights`.

    Raises:
        WeightsCorrupt: half an adapter, or one that fits no weight.
    """
    from slipstream.weights.manifest import describe_tensors

    adapter = manifest.adapter
    assert adapter is not None
    scale = np.float32(adapter.alpha / adapter.rank)
    added: dict[str, np.ndarray] = {}
    for module in sorted(_modules(tensors)):
        name, weight = f"{module}.weight", weights.get(f"{module}.weight")
        a, b = (tensors.get(f"{PREFIX}{module}{half}") for half in (_A, _B))
        if a is None or b is None or weight is None or not _fit(weight, a, b, adapter.rank):
            raise WeightsCorrupt(f"the adapter of {name} does not fit it", slice=name, version=manifest.version)
        product = b.astype(np.float32) @ a.astype(np.float32)
        added[name] = (weight.astype(np.float32) + scale * product).astype(weight.dtype)
    described, _ = describe_tensors(added)
    kept = tuple(part for part in base.slices if part.name not in added)
    return replace(manifest, slices=kept + described, adapter=None), {**weights, **added}


def _fit(weight: np.ndarray, a: np.ndarray, b: np.ndarray, rank: int) -> bool:
    return weight.ndim == 2 and a.shape == (rank, weight.shape[1]) and b.shape == (weight.shape[0], rank)


def _modules(names: Iterable[str]) -> set[str]:
    """Modules that have an adapter, or half of one."""
    found = set()
    for name in names:
        if not is_base(name):
            half = next((half for half in (_A, _B) if name.endswith(half)), None)
            if half is None:
                raise WeightsCorrupt(f"{name} is no part of an adapter", slice=name)
            found.add(name.removeprefix(PREFIX).removesuffix(half))
    return found
