"""Modules with adapters: what they were, and beside each weight a product of two narrow matrices.

Both are plain parameters, `lora_a` and `lora_b` beside `weight`, and for stacked experts `w1_EFD_lora_a` `[E, r, D]`
and `w1_EFD_lora_b` `[E, F, r]`, whose first dimension is the experts' like the weight's.

E = experts; D, F = widths; r = rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.projections import ProjectedExperts, extend, grouped_linear, own_part

LORA_A, LORA_B, SCALE = "lora_a", "lora_b", "lora_scale"


class Adapted:
    """A linear layer's mixin."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own output, and the adapter's."""
        base = super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        return base + F.linear(self.lora_scale * F.linear(x, self.lora_a), self.lora_b)


class AdaptedExperts(ProjectedExperts):
    """A mixin for experts."""

    lora_scale: float

    def project(self, name: str, x: Tensor, counts_E: Tensor) -> Tensor:
        """The weight's own product, and the adapter's."""
        base = super().project(name, x, counts_E)
        a = getattr(self, adapter_name(name, LORA_A), None)
        if a is None:
            return base
        b = getattr(self, adapter_name(name, LORA_B))
        narrow = self.lora_scale * grouped_linear(x, own_part(a), counts_E)  # where it is narrow
        return base + grouped_linear(narrow, own_part(b), counts_E)


def adapter_name(parameter: str, half: str) -> str:
    """The attribute that holds one half of a parameter's adapter."""
    return half if parameter == "weight" else f"{parameter}_{half}"


@torch.no_grad()
def adapt(module: nn.Module, parameter: str, rank: int, scale: float, generator: torch.Generator) -> None:
    """Give a module's parameter `[..., out, in]` an adapter that adds nothing yet."""
    weight: nn.Parameter = getattr(module, parameter)
    if extend(module, Adapted if parameter == "weight" else AdaptedExperts):
        setattr(module, SCALE, scale)
    *stack, out_features, in_features = weight.shape
    a = torch.empty(*stack, rank, in_features).uniform_(-1.0, 1.0, generator=generator) / in_features**0.5
    for half, tensor in ((LORA_A, a), (LORA_B, torch.zeros(*stack, out_features, rank))):
        module.register_parameter(
            adapter_name(parameter, half), nn.Parameter(tensor.to(dtype=torch.float32, device=weight.device))
        )
