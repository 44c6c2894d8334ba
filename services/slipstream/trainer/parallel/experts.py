"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Two exchanges a layer and direction. Rows arrive rank by rank, sorted by expert within each; they are sorted by expert
once more, so that each expert sees one run of rows, in the order of ranks and tokens.

T = tokens of this rank, K = experts a token, N = T*K routed rows, M = rows that arrive here, D = width, E = experts of
the layer, e = experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.models.qwen3_moe.experts import GatherRows, Permutation, PermutingDispatcher
from slipstream.trainer.parallel.collectives import all_to_all, exchange


@dataclass(frozen=True)
class Journey:
    """How rows came here and how they go home."""

    here: Permutation
    """Of the N rows of this rank, by expert."""

    order_M: Tensor
    """Sorts the rows that arrived by expert."""

    inverse_M: Tensor
    sent: list[int]
    received: list[int]


class AllToAllDispatcher(PermutingDispatcher):
    """A dispatcher for experts that are spread over a group of ranks; only gathers and exchanges."""

    def __init__(self, config: Any, group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self._group = group

    def dispatch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Journey]:
        """Rows of all ranks for the experts here, sorted by expert, and the count for each of them."""
        ranks = dist.get_world_size(self._group)
        rows_ND, counts_E, here = super().dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        local = counts_E.numel() // ranks
        arriving_Re = exchange(counts_E, [local] * ranks, [local] * ranks, self._group).view(ranks, local)
        sent = counts_E.view(ranks, local).sum(1).tolist()
        received = arriving_Re.sum(1).tolist()
        rows_MD = all_to_all(rows_ND, received, sent, self._group)
        expert_M = torch.arange(local, device=x_TD.device).repeat(ranks).repeat_interleave(arriving_Re.reshape(-1))
        order_M = torch.argsort(expert_M, stable=True)
        inverse_M = torch.empty_like(order_M)
        inverse_M[order_M] = torch.arange(order_M.numel(), device=x_TD.device)
        sorted_MD = GatherRows.apply(rows_MD, order_M, inverse_M.view(-1, 1))
        return sorted_MD, arriving_Re.sum(0), Journey(here, order_M, inverse_M, sent, received)

    def combine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, routed_output_RD: Tensor, metadata: Journey, x_TD: Tensor
    ) -> Tensor:
        """Send outputs home, then weigh and add them up."""
        rows_MD = GatherRows.apply(routed_output_RD, metadata.inverse_M, metadata.order_M.view(-1, 1))
        rows_ND = all_to_all(rows_MD, metadata.sent, metadata.received, self._group)
        return super().combine(rows_ND, metadata.here, x_TD)
