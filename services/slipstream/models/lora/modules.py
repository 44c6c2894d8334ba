"""Modules with adapters: what they were, and beside each weight a product of two narrow ones.

An adapted module is the one it was, its class extended, so that its weights keep their names and whatever shards,
checkpoints or quantises it finds plain parameters: `lora_a` and `lora_b` beside `weight`, and for stacked experts
`w1_EFD_lora_a` `[E, r, D]` and `w1_EFD_lora_b` `[E, F, r]`, whose first dimension is the experts' like the weight's.

R = rows routed to experts, sorted by expert; E = experts; D, F = widths; r = rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LORA_A, LORA_B, SCALE = "lora_a", "lora_b", "lora_scale"


class LinearWithAdapter:
    """A linear layer's mixin."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own output, and the adapter's."""
        base = super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        return base + self.lora_scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class ExpertsWithAdapters:
    """A mixin for gated experts that are stacked in `w1_EFD`, `w2_EDF` and `w3_EFD`."""

    lora_scale: float
    activation: Any

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Outputs in the order of `x_RD`, whose rows are sorted by expert."""
        gate_RF = self._projected("w1_EFD", x_RD, num_tokens_per_expert_E)
        up_RF = self._projected("w3_EFD", x_RD, num_tokens_per_expert_E)
        hidden_RF = getattr(self, "activation", F.silu)(gate_RF) * up_RF
        return self._projected("w2_EDF", hidden_RF, num_tokens_per_expert_E).type_as(x_RD)

    def _projected(self, name: str, x: Tensor, counts_E: Tensor) -> Tensor:
        base = grouped_linear(x, _local(getattr(self, name)), counts_E)
        a = getattr(self, adapter_name(name, LORA_A), None)
        if a is None:
            return base
        narrow = grouped_linear(x, _local(a), counts_E)
        wide = grouped_linear(narrow, _local(getattr(self, adapter_name(name, LORA_B))), counts_E)
        return base + self.lora_scale * wide


def adapter_name(parameter: str, half: str) -> str:
    """The attribute that holds one half of a parameter's adapter."""
    return half if parameter == "weight" else f"{parameter}_{half}"


def grouped_linear(x: Tensor, weight_Eoi: Tensor, counts_E: Tensor) -> Tensor:
    """`x @ weight.T` with each row's own expert; rows are sorted by expert."""
    if x.device.type != "cpu":
        ends_E = torch.cumsum(counts_E, dim=0, dtype=torch.int32)
        weight_Eio = weight_Eoi.bfloat16().transpose(-2, -1)
        return torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.bfloat16(), weight_Eio, offs=ends_E
        )
    # unbind: one backward node a weight; indexing would make a full-size zero gradient for each expert.
    rows = x.split(counts_E.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows, weight_Eoi.unbind(0), strict=True)])


@torch.no_grad()
def adapt(module: nn.Module, parameter: str, rank: int, scale: float, generator: torch.Generator) -> None:
    """Give a module's parameter `[..., out, in]` an adapter that adds nothing yet."""
    weight: nn.Parameter = getattr(module, parameter)
    mixin = LinearWithAdapter if parameter == "weight" else ExpertsWithAdapters
    if not isinstance(module, mixin):
        module.__class__ = _extended(mixin, type(module))
        setattr(module, SCALE, scale)
    *stack, out_features, in_features = weight.shape
    a = torch.empty(*stack, rank, in_features).uniform_(-1.0, 1.0, generator=generator) / in_features**0.5
    for half, tensor in ((LORA_A, a), (LORA_B, torch.zeros(*stack, out_features, rank))):
        module.register_parameter(
            adapter_name(parameter, half), nn.Parameter(tensor.to(dtype=weight.dtype, device=weight.device))
        )


@cache
def _extended(mixin: type, own: type) -> type:
    return type(f"{own.__name__}WithAdapter", (mixin, own), {"__module__": own.__module__})


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds: experts are spread whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
