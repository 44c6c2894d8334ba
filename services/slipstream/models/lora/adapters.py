"""The adapters of a model, by the names of its checkpoint.

`hf_views` shows where each matrix of a checkpoint lies in a parameter. An adapter's second half has the parameter's
rows, so it is cut the same way; its first half is shared by all that are fused into one parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.common.config import ConfigError
from slipstream.models.base import Model
from slipstream.models.lora.config import AdapterConfig
from slipstream.models.lora.modules import LORA_A, LORA_B, adapt, adapter_name
from slipstream.models.projections import owners, start_of
from slipstream.models.targets import chosen, last_part

PREFIX = "base_model.model."
"""Of names in an adapter's file: what PEFT calls the model that it wraps."""


@dataclass(frozen=True)
class Site:
    """Where the adapter of one checkpoint matrix lies."""

    module: nn.Module
    parameter: str
    expert: int | None
    """Which of a stack, or None."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the matrix's rows in the parameter, counted in rows."""
    first_row: int

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        """Those that hold the halves, of all experts where they are stacked."""
        a, b = (getattr(self.module, adapter_name(self.parameter, half)) for half in (LORA_A, LORA_B))
        return a, b

    def halves(self) -> tuple[Tensor, Tensor]:
        """`[rank, in]` and `[out, rank]`."""
        a, b = map(_whole, self.parameters)
        b, rank = b.contiguous(), b.shape[-1]
        start = b.storage_offset() + self.first_row * rank
        rows = b.as_strided((*self.shape, rank), (*(stride * rank for stride in self.strides), 1), start)
        return a if self.expert is None else a[self.expert], rows.reshape(-1, rank)


class Adapters:
    """What `attach` made; `model.adapters`."""

    def __init__(self, config: AdapterConfig, sites: dict[str, Site]) -> None:
        self.config = config
        self._sites = sites
        self._adapted = list({(site.module, site.parameter): site for site in sites.values()}.values())
        """One of each parameter that has an adapter."""
        self._views: dict[str, Tensor] = {}
        self._made_anew: dict[str, Site] = {}
        self._places: tuple[int, ...] = ()

    @property
    def modules(self) -> list[str]:
        """Checkpoint names of the matrices that have one, without `.weight`."""
        return [name.removesuffix(".weight") for name in self._sites]

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Both halves of each, by the names that PEFT gives them. Some share memory with the live parameters."""
        places = tuple(start_of(parameter) for site in self._adapted for parameter in site.parameters)
        if places != self._places:
            self._places, self._made_anew, live = places, {}, set(places)
            self._views = self._tensors(self._sites)
            for name, site in self._sites.items():
                names = _names_of(name)
                if not all(start_of(self._views[each]) in live for each in names):
                    self._made_anew[name] = site
                    self._views |= dict.fromkeys(names, torch.empty(0))  # to keep the order, not the memory
        # Those of experts are tens of thousands, and the same each time.
        return {**self._views, **self._tensors(self._made_anew)}

    def _tensors(self, sites: dict[str, Site]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, site in sites.items():
            found |= zip(_names_of(name), (half.contiguous() for half in site.halves()), strict=True)
        return found

    @torch.no_grad()
    def halves(self) -> dict[str, tuple[Tensor, Tensor]]:
        """`[rank, in]` and `[out, rank]` by the name of the matrix; all ranks take part."""
        return {name: site.halves() for name, site in self._sites.items()}

    @torch.no_grad()
    def merged(self, name: str, matrix: Tensor) -> Tensor:
        """A checkpoint's matrix with what its adapter adds; one without an adapter as it is."""
        site = self._sites.get(name)
        if site is None:
            return matrix
        a, b = site.halves()
        return (matrix.float() + self.config.scale * (b.float() @ a.float())).to(matrix.dtype)


def attach(model: Model, config: AdapterConfig, seed: int) -> Adapters:
    """Give a model adapters, which add nothing yet, and freeze all else. Before it is sharded.

    Raises:
        ConfigError: a target that the model does not have, or a part of what is one matrix here.
    """
    tree: Any = model
    parameters = owners(model)
    parts: dict[int, list[str]] = {}
    views = model.hf_views()
    try:
        meant = chosen(views, config.targets)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.targets: {error}") from None
    for name, view in views.items():
        parts.setdefault(start_of(view), []).append(name)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    sites: dict[str, Site] = {}
    for start, names in parts.items():
        wanted = [name for name in names if name in meant]
        if not wanted:
            continue
        if len(wanted) < len(names):
            parts_of = ", ".join(map(last_part, names))
            raise ConfigError(f"trainer.lora.targets: {parts_of} are one matrix: name all or none")
        module, parameter, weight = parameters[start]
        adapt(module, parameter, config.rank, config.scale, generator)
        sites |= {name: _site(module, parameter, weight, views[name]) for name in wanted}
    adapters = Adapters(config, sites)
    tree.adapters = adapters
    return adapters


def _names_of(name: str) -> tuple[str, str]:
    """Of both halves, by the name of the matrix."""
    module = PREFIX + name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapters_of(model: Model) -> Adapters | None:
    """A model's adapters, if it has any."""
    return getattr(model, "adapters", None)


def _site(module: nn.Module, parameter: str, weight: Tensor, view: Tensor) -> Site:
    width = weight.shape[-1]
    offset = view.storage_offset() - weight.storage_offset()
    strides = view.stride()
    if strides[-1] != 1 or view.shape[-1] != width or any(stride % width for stride in (offset, *strides[:-1])):
        raise ConfigError(f"trainer.lora: {parameter} of {type(module).__name__} is not cut by rows")
    expert = offset // prod(weight.shape[1:]) if weight.ndim == 3 else None
    rows = tuple(stride // width for stride in strides[:-1])
    return Site(module, parameter, expert, tuple(view.shape[:-1]), rows, offset // width)


def _whole(parameter: Tensor) -> Tensor:
    """All ranks' parts together: an adapter is small."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
