"""How modules of any model are extended: adapters and FP8 each change what a projection computes, and stack.

An extended module is the one it was, its class a subclass, so that its weights keep their names, and whatever shards or
checkpoints it finds plain parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.models.expert_rows import gated
from slipstream.models.grouped import grouped_product, takes_kernel


class ProjectedExperts:
    """Gated experts, stacked in `w1_EFD`, `w2_EDF` and `w3_EFD`, each projection of which may be extended.

    R = rows routed to experts, sorted by expert; E = experts; D, F = widths.
    """

    activation: Any

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Outputs in the order of `x_RD`, whose rows are sorted by expert."""
        gate_RF = self.project("w1_EFD", x_RD, num_tokens_per_expert_E)
        up_RF = self.project("w3_EFD", x_RD, num_tokens_per_expert_E)
        activation = getattr(self, "activation", F.silu)
        hidden_RF = gated(gate_RF, up_RF) if activation is F.silu else activation(gate_RF) * up_RF
        return self.project("w2_EDF", hidden_RF, num_tokens_per_expert_E).type_as(x_RD)

    def project(self, name: str, x: Tensor, counts_E: Tensor) -> Tensor:
        """`x` times the weight of that name, each row times its own expert's."""
        return grouped_linear(x, own_part(getattr(self, name)), counts_E)


def grouped_linear(x: Tensor, weight_Eoi: Tensor, counts_E: Tensor) -> Tensor:
    """`x @ weight.T` with each row's own expert; rows are sorted by expert."""
    if takes_kernel(x):
        return grouped_product(x, weight_Eoi, group_ends(counts_E))
    # unbind: one backward node a weight; indexing would make a full-size zero gradient for each expert.
    rows = x.split(counts_E.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows, weight_Eoi.unbind(0), strict=True)])


def group_ends(counts_E: Tensor) -> Tensor:
    """Where each expert's rows end."""
    return torch.cumsum(counts_E, dim=0, dtype=torch.int32)


def own_part(parameter: Tensor) -> Tensor:
    """What this rank holds: experts are spread whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def extend(module: nn.Module, mixin: type) -> bool:
    """Put a mixin before a module's class; False if it has it already."""
    if isinstance(module, mixin):
        return False
    module.__class__ = _extended(mixin, type(module))
    return True


def start_of(tensor: Tensor) -> int:
    """Names the memory of a tensor and of its views."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # on "meta" there is no address


def owners(model: Any) -> dict[int, tuple[nn.Module, str, nn.Parameter]]:
    """By `start_of` their memory: parameters, the modules that have them, and their names there."""
    return {
        start_of(parameter): (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


@cache
def _extended(mixin: type, own: type) -> type:
    return type(f"{mixin.__name__}{own.__name__}", (mixin, own), {"__module__": own.__module__})
