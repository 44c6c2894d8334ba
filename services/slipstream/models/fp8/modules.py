"""Modules that multiply in FP8. Their weights stay what they are: what is trained and published is not rounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.common.config import ConfigError
from slipstream.models.base import Model
from slipstream.models.fp8 import card
from slipstream.models.fp8.blocks import block_linear, rounded_weight
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.projections import ProjectedExperts, extend, own_part, owners, start_of
from slipstream.models.targets import chosen

EMULATED, NAMES, KEPT = "fp8_emulated", "fp8_names", "fp8_kept"


class Kept:
    """Rounded weights of a module, kept while they are frozen and nobody has written to them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def weight(self, name: str, weight: Tensor) -> Tensor:
        if weight.requires_grad:
            return rounded_weight(weight)
        version, kept = self._kept.get(name, (-1, weight))
        if version != weight._version:
            version, kept = self._kept[name] = weight._version, rounded_weight(weight)
        return kept


class Fp8Linear:
    """A linear layer's mixin."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    fp8_emulated: bool
    fp8_kept: Kept

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output; a bias is not rounded."""
        if x.device.type == "cpu" or self.fp8_emulated:
            shown = None if _learns(x, self.weight) else self.fp8_kept.weight("weight", self.weight)
            product = block_linear(x, self.weight, shown)
        elif card.takes(self.weight):
            product = card.linear(x, self.weight)
        else:
            return super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        return product if self.bias is None else product + self.bias


class Fp8Experts(ProjectedExperts):
    """A mixin for experts."""

    fp8_emulated: bool
    fp8_names: set[str]
    fp8_kept: Kept

    def project(self, name: str, x: Tensor, counts_E: Tensor) -> Tensor:
        """`x` times the weight of that name, in FP8 if it is one of those."""
        weight_E = own_part(getattr(self, name))
        emulated = x.device.type == "cpu" or self.fp8_emulated
        if name not in self.fp8_names or not (emulated or card.takes(weight_E)):
            return super().project(name, x, counts_E)
        if not emulated:
            return card.grouped_linear(x, weight_E, counts_E)
        shown_E = weight_E if _learns(x, weight_E) else self.fp8_kept.weight(name, weight_E)
        parts = zip(x.split(counts_E.tolist()), weight_E.unbind(0), shown_E.unbind(0), strict=True)
        rounded = shown_E is not weight_E
        return torch.cat([block_linear(part, weight, shown if rounded else None) for part, weight, shown in parts])


def convert(model: Model, config: Fp8Config) -> None:
    """Let a model's projections multiply in FP8. Before adapters are attached.

    Raises:
        ConfigError: a target that the model does not have.
    """
    views, parameters = model.hf_views(), owners(model)
    try:
        names = chosen(views, config.targets)
    except ValueError as error:
        raise ConfigError(f"trainer.fp8.targets: {error}") from None
    for start in {start_of(views[name]) for name in names}:
        module, name, _ = parameters[start]
        if extend(module, Fp8Linear if name == "weight" else Fp8Experts):
            setattr(module, EMULATED, config.backend == "emulated")
            setattr(module, NAMES, set())
            setattr(module, KEPT, Kept())
        getattr(module, NAMES).add(name)


def _learns(x: Tensor, weight: Tensor) -> bool:
    """Whether a gradient will be asked for."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
