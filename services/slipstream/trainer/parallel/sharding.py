"""A model spread over the ranks of a layout: FSDP2, with experts on ranks of their own, float32.

    ranked = shard(model, World(Layout(data=2, expert=2)))
    logits_RV = ranked(part)                    # of this rank's targets
    (local_loss_sum / step_token_count).backward()
    norm = gradient_norm(ranked)

Gradients are *sums* over ranks: what a rank adds is its part of a sum that has been divided by the step's token count.
So no rank's share of tokens matters, and neither does how they were dealt out. A `World` of one rank leaves the model
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from slipstream.models.base import Model
from slipstream.models.light_import import light_imports
from slipstream.trainer.muon import local
from slipstream.trainer.parallel.context import context_of
from slipstream.trainer.parallel.experts import AllToAllDispatcher
from slipstream.trainer.parallel.slices import Slice, slice_of
from slipstream.trainer.parallel.world import World
from slipstream.trainer.sequence import Lost, TrainSequence

with light_imports():
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder


Checkpointing = Literal["none", "selective", "full"]
"""Which activations of a block are computed again in the backward pass, with the same replayed routes."""


class Ranked(nn.Module):
    """A sharded model. Its forward pass is one call, as FSDP gathers parameters around calls of modules."""

    def __init__(self, model: Any, world: World) -> None:
        super().__init__()
        self.model: Any = model
        self.world = world
        self.device = next(model.parameters()).device

    def forward(
        self,
        part: Slice,
        share_LE: Tensor | None = None,
        *,
        replay: bool = True,
        margins: bool = False,
        capture: bool = False,
    ) -> Tensor:
        """Logits that predict the targets of this rank's slice; of none, no rows, with a gradient of zero.

        With `share_LE`, `model.routes.balance_loss()` is this slice's part of a sum afterwards. Without
        `replay` all tokens are routed live, padding too.
        """
        model: Model = self.model
        known_S = part.known_S if replay else np.zeros_like(part.known_S)
        model.routes.begin(
            replay_TLK=self._tensor(part.replay_SLK) if known_S.any() else None,
            known_T=self._tensor(known_S),
            balance=share_LE is not None,
            share_LE=share_LE,
            token_mask_T=self._tensor(part.real_S),
            margins=margins,
            capture=capture,
        )
        hidden_1SD = model.hidden(
            self._tensor(part.tokens_S).unsqueeze(0),
            self._tensor(part.positions_S).unsqueeze(0),
            context_of(part, self.world.layout.context_kind, self.world.context_group, self.device),
        )
        return model.logits(hidden_1SD[0].index_select(0, self._tensor(part.source_R)))

    def of_targets(self, values_R: Tensor, part: Slice) -> Tensor:
        """Values of all targets of the micro-batch, from those of each context rank.

        The gradient comes back to whose value it is: every rank computes the same loss from what it gets, and each
        keeps its own part of the gradient.
        """
        if self.world.context_group is None:
            return values_R
        index_R = self._tensor(part.target_index_R)
        return _OfTargets.apply(values_R, index_R, part.target_count, self.world.context_group)

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class _OfTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_R: Tensor, index_R: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index_R)
        whole = values_R.new_zeros(count)
        whole[index_R] = values_R
        dist.all_reduce(whole, group=group)  # each place has one value, and zeros are added to it
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (index_R,) = ctx.saved_tensors
        return grads[0].index_select(0, index_R), None, None, None


def shard(model: Model, world: World, checkpointing: Checkpointing = "none", compiled: bool = False) -> Ranked:
    """Spread `model`, which is whole and the same on all ranks, in place."""
    world.layout.check_heads(model.sizes.n_heads, model.sizes.n_kv_heads)
    expert_mesh = world.dims and world.dims.get_optional_mesh("ep")
    if expert_mesh is not None:
        _spread_experts(model, expert_mesh)
    if checkpointing != "none":
        policy = FullAC if checkpointing == "full" else SelectiveAC
        policy.Config().build().apply(model)  # pyright: ignore[reportArgumentType]
    if compiled:
        for block in model.layers.values():  # pyright: ignore[reportAttributeAccessIssue]
            block.compile()
    ranked = Ranked(model, world)
    if world.dims is None:
        return ranked
    mesh = world.dims.get_mesh("fsdp")
    apply_fsdp_to_decoder(
        model,  # pyright: ignore[reportArgumentType]
        mesh,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=world.layout.expert,
        edp_mesh=world.dims.get_optional_mesh("efsdp"),
    )
    fully_shard(ranked, mesh=mesh)
    for module in ranked.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise the factor travels as PREMUL_SUM, which gloo has not.
            module.set_force_sum_reduction_for_comms(True)
    return ranked


def _spread_experts(model: Any, mesh: DeviceMesh) -> None:
    """Leave each rank of the expert group its run of experts, and give layers a dispatcher that reaches the rest."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for block in model.layers.values():
        if not getattr(block, "moe_enabled", False):
            continue
        routed = block.moe.routed_experts
        if routed.inner_experts.num_experts % ranks:
            raise ValueError(f"expert: {ranks} ranks cannot share {routed.inner_experts.num_experts} experts evenly")
        for name, weight in list(routed.inner_experts.named_parameters(recurse=False)):
            local = weight.detach().chunk(ranks)[rank].clone()
            spread = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
            spread.requires_grad_(weight.requires_grad)
            routed.inner_experts.register_parameter(name, spread)
        old = routed.token_dispatcher
        config = AllToAllDispatcher.Config(num_experts=old.num_experts, top_k=old.top_k)
        routed.token_dispatcher = AllToAllDispatcher(config, mesh.get_group())


def slice_for(ranked: Ranked, batch: Sequence[TrainSequence | Lost]) -> Slice:
    """What this rank computes of a micro-batch."""
    routes, world = ranked.model.routes, ranked.world
    return slice_of(
        batch,
        context=world.layout.context,
        rank=world.context_rank,
        moe_layers=routes.moe_layers,
        top_k=routes.top_k,
        expert_count=routes.expert_count,
    )


@torch.no_grad()
def gradient_norm(ranked: Ranked) -> Tensor:
    """Norm of the whole gradient. Every entry is on exactly one rank, so squares add up over all of them."""
    parts = [local(p.grad) for p in ranked.parameters() if p.grad is not None]
    square = torch.stack([grad.square().sum() for grad in parts]).sum() if parts else torch.zeros(())
    return ranked.world.sum(square).sqrt()


@torch.no_grad()
def scale_gradient(ranked: Ranked, factor: float) -> None:
    """Multiply all of it."""
    for parameter in ranked.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
