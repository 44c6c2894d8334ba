"""Where the tensors of a checkpoint lie in one stretch of memory, in the order of vLLM's own parameters.

vLLM fuses matrices: the queries, keys and values of a layer, or what compresses them, the gate and up of a dense layer,
the gates and ups of all its experts, the downs of all its experts. Tensors that become one parameter lie beside each
other here, so that it is filled by one copy. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ALIGNMENT_BYTES = 256
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PROJECTION = re.compile(r"(.+\.self_attn)\.([qkv])_proj\.(weight|bias)")
_LATENT = re.compile(r"(.+\.self_attn)\.(q_a_proj|kv_a_proj_with_mqa)\.weight")
_DENSE = re.compile(r"(.+\.mlp(?:\.shared_experts)?)\.(gate|up)_proj\.weight")
_OF_EXPERTS = ("w13_weight", "w2_weight")


@dataclass(frozen=True)
class Group:
    """The tensors of one parameter of vLLM, in its memory order."""

    module: str
    """Of vLLM's model. Experts lie in some module below it."""
    parameter: str
    names: tuple[str, ...]

    @property
    def of_experts(self) -> bool:
        """Whether it holds a matrix of each expert."""
        return self.parameter in _OF_EXPERTS


@dataclass(frozen=True)
class Place:
    """Where one tensor lies."""

    offset_bytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Places of all tensors of a version."""

    dtype: str
    groups: tuple[Group, ...]
    places: Mapping[str, Place]
    size_bytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Layout:
        """The same for the same arguments, in every process."""
        places: dict[str, Place] = {}
        groups, at = group(shapes), 0
        for each in groups:
            at = -(-at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            for name in each.names:
                places[name] = Place(at, tuple(shapes[name]))
                at += prod(shapes[name]) * ITEM_BYTES[dtype]
        return cls(dtype, groups, places, max(at, 1))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self.places.items()}


def group(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Group, ...]:
    """Tensors by the parameter they become, sorted by module."""
    members: dict[tuple[str, str], list[tuple[tuple[int, int], str]]] = {}
    for name in shapes:
        expert, projection, latent, dense = (
            pattern.fullmatch(name) for pattern in (_EXPERT, _PROJECTION, _LATENT, _DENSE)
        )
        if expert is not None:
            parameter = "w2_weight" if expert[3] == "down" else "w13_weight"
            key, order = (expert[1], parameter), (int(expert[2]), int(expert[3] == "up"))
        elif projection is not None and f"{projection[1]}.k_proj.{projection[3]}" in shapes:
            key, order = (f"{projection[1]}.qkv_proj", projection[3]), ("qkv".index(projection[2]), 0)
        elif latent is not None and f"{latent[1]}.q_a_proj.weight" in shapes:
            key, order = (f"{latent[1]}.fused_qkv_a_proj", "weight"), (int(latent[2] != "q_a_proj"), 0)
        elif dense is not None:
            key, order = (f"{dense[1]}.gate_up_proj", "weight"), (int(dense[2] == "up"), 0)
        else:
            module, _, parameter = name.rpartition(".")
            key, order = (module, parameter), (0, 0)
        members.setdefault(key, []).append((order, name))
    return tuple(
        Group(module, parameter, tuple(name for _, name in sorted(found)))
        for (module, parameter), found in sorted(members.items())
    )
