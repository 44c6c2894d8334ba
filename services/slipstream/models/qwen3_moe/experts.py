"""Expert nodes: dispatch by permutation; on a CPU float32 and one matrix product an expert.

torchtitan's own nodes compute in bfloat16 with a grouped kernel, which on a card is what is taken here, too, unless
float32 is asked for. They add results by an index: on a CPU gathering rows by the inverse permutation is several times
faster, also in the backward pass, where a gather replaces an accumulation by index. On a card kernels of our own add up
the rows of a token and multiply gates (`models/expert_rows.py`), which plain operators do in several passes.

T = tokens, K = experts a token, N = T*K routed rows, D = width, F = hidden width of an expert, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.expert_rows import FUSED_ON, GatherRows, add_up, gated
from slipstream.models.grouped import takes_kernel
from slipstream.models.titan import GroupedExperts, LocalTokenDispatcher


@dataclass(frozen=True)
class Permutation:
    """Where routed rows went: `order_N` sorts them by expert, `inverse_N` brings them back."""

    order_N: Tensor
    inverse_N: Tensor
    scores_TK: Tensor


class PermutingDispatcher(LocalTokenDispatcher):
    """Local dispatcher that only gathers, forward and backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        """Same fields as torchtitan's local dispatcher."""

    def dispatch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Permutation]:
        """Routed rows sorted by expert, the count for each expert, and the way back."""
        order_N = torch.argsort(topk_expert_ids_TK.reshape(-1), stable=True)
        inverse_N = torch.empty_like(order_N)
        inverse_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
        rows_ND = GatherRows.apply(x_TD, order_N // self.top_k, inverse_N.view(-1, self.top_k))
        return rows_ND, num_local_tokens_per_expert_E, Permutation(order_N, inverse_N, topk_scores_TK)

    def combine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, routed_output_RD: Tensor, metadata: Permutation, x_TD: Tensor
    ) -> Tensor:
        """Weighted sum of each token's experts."""
        if x_TD.device.type in FUSED_ON:
            places_TK = metadata.inverse_N.view(-1, self.top_k)
            return add_up(routed_output_RD, places_TK, metadata.scores_TK, x_TD.dtype)
        rows_ND = GatherRows.apply(routed_output_RD, metadata.inverse_N, metadata.order_N.view(-1, 1))
        rows_TKD = rows_ND.view(x_TD.shape[0], self.top_k, x_TD.shape[-1])
        return (rows_TKD * metadata.scores_TK.unsqueeze(2)).sum(1).to(x_TD.dtype)


def _local(weight: Tensor) -> Tensor:
    """The experts of this rank, where they are spread over several. Importing DTensor's class takes a second."""
    part: Any = weight
    return part.to_local() if hasattr(part, "to_local") else weight


class SplitExperts(GroupedExperts):
    """Gated experts in the dtype of their weights, in a loop over the rows of each expert."""

    activation = staticmethod(F.silu)
    """Of the gate."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Same fields as torchtitan's grouped experts."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Outputs in the order of `x_RD`, whose rows are sorted by expert."""
        if takes_kernel(x_RD) and self.activation is F.silu:
            return self._grouped(x_RD, num_tokens_per_expert_E)
        # unbind: one backward node a weight; indexing would make a full-size zero gradient for each expert.
        weights = zip(*(_local(w).unbind(0) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)), strict=True)
        splits = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat(
            [
                F.linear(self.activation(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, (w1, w2, w3) in zip(splits, weights, strict=True)
            ]
        )

    def _grouped(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """One grouped kernel for each of the three products, in bfloat16."""
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        rows_RD = x_RD.bfloat16()
        w1, w2, w3 = (_local(w).bfloat16().transpose(-2, -1) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        gate_RF, up_RF = (self._grouped_mm(A=rows_RD, B_t=w, offs=ends_E) for w in (w1, w3))
        return self._grouped_mm(A=gated(gate_RF, up_RF), B_t=w2, offs=ends_E).type_as(x_RD)
