"""What vLLM's CPU build lacks for expert-parallel ranks: without it a step raises NotImplementedError, or crashes.

Its communicator has no collectives of unequal sizes, and its expert kernel takes the ids of experts for places among
those of the rank, which are out of bounds on every rank but the first.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_MENDED = "_slipstream_mended"


def mend_cpu_ranks() -> None:
    """Add the collectives, and find each rank's experts."""
    original: Any = CPUUnquantizedExperts.apply
    if hasattr(original, _MENDED):
        return

    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        if expert_map is not None:
            topk_weights, topk_ids = own_experts(topk_weights, topk_ids, expert_map)
        weights = (w1, w2, topk_weights, topk_ids)
        original(self, output, hidden_states, *weights, activation, global_num_experts, expert_map, *rest, **named)

    setattr(apply, _MENDED, True)
    CPUUnquantizedExperts.apply = apply  # type: ignore[method-assign]
    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign]


def own_experts(weights_TK: Tensor, ids_TK: Tensor, expert_map_E: Tensor) -> tuple[Tensor, Tensor]:
    """Places of this rank's experts, and weight 0 for those of other ranks (-1 in the map)."""
    places_TK = expert_map_E[ids_TK.long()]
    return torch.where(places_TK >= 0, weights_TK, 0), places_TK.clamp_min(0).to(ids_TK.dtype)


def _all_gatherv(self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Rows of all ranks, each as many as `sizes` says. Gloo gathers equal shapes alone: rows are padded."""
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    counts = list(sizes or [input_.shape[0]] * self.world_size)
    padded = input_.new_zeros((max(counts), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """The sum over ranks of this rank's rows."""
    assert dim == 0
    counts = list(sizes or [input_.shape[0] // self.world_size] * self.world_size)
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.device_group)
    start = sum(counts[: self.rank_in_group])
    return total[start : start + counts[self.rank_in_group]].contiguous()
