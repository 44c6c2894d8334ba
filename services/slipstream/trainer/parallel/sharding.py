"""A model spread over the ranks of a layout: FSDP2, with experts on ranks of their own, float32.

    ranked = shard(model, World(Layout(data=2, expert=2)))
    logps_R, entropy_R = ranked(part)           # of this rank's targets
    (local_loss_sum / step_token_count).backward()
    norm = gradient_norm(ranked)

Gradients are *sums* over ranks: what a rank adds is its part of a sum that has been divided by the step's token count.
So no rank's share of tokens matters, and neither does how they were dealt out. A `World` of one rank leaves the model
as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from slipstream.models.base import Model
from slipstream.models.head import target_logps
from slipstream.models.light_import import light_imports
from slipstream.models.turned import turn_at_once
from slipstream.trainer import recompute
from slipstream.trainer.muon import local
from slipstream.trainer.parallel.context import context_of
from slipstream.trainer.parallel.experts import AllToAllDispatcher
from slipstream.trainer.parallel.filling import set_tables
from slipstream.trainer.parallel.slices import Slice, slice_of
from slipstream.trainer.parallel.world import World
from slipstream.trainer.sequence import Lost, TrainSequence

with light_imports():
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

# Outputs of a sharded module are views here, and nothing writes to them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True)
class Passes:
    """How forward and backward passes compute."""

    bfloat16: bool = False
    """Products by autocast, and what layers hand on; weights and sums of gradients stay float32."""
    logits_bytes: int = 2**29
    """Logits that exist at once; those of more rows are computed in parts (`models/head.py`)."""
    round_once: bool | None = False
    """Whether bfloat16 products of a step take the same copies of weights (`rounded.py`); None where there is room.
    Of a rank alone."""

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def chunk_rows(self, vocab_size: int) -> int:
        return max(1, self.logits_bytes // (4 * vocab_size))


DEFAULT_PASSES = Passes()


class Ranked(nn.Module):
    """A sharded model. Its forward pass is one call, as FSDP gathers parameters around calls of modules."""

    def __init__(self, model: Any, world: World, passes: Passes) -> None:
        super().__init__()
        self.model: Any = model
        self.world = world
        self.device = next(model.parameters()).device
        self._passes = passes

    def forward(
        self,
        part: Slice,
        share_LE: Tensor | None = None,
        temperature_R: Tensor | None = None,
        *,
        replay: bool = True,
        margins: bool = False,
        capture: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets of this rank's slice and entropies; of none, none, with a gradient of zero.

        `temperature_R`: of all targets of the micro-batch. With `share_LE`, `model.routes.balance_loss()` is this
        slice's part of a sum afterwards. Without `replay` all tokens are routed live, padding too.
        """
        model = self.model
        # What is so of all tokens is said without a mask, for which a card would have to be waited for.
        known_S = part.known_S if replay else np.zeros_like(part.known_S)
        model.routes.begin(
            replay_TLK=self._tensor(part.replay_SLK) if known_S.any() else None,
            known_T=None if known_S.all() else self._tensor(known_S),
            balance=share_LE is not None,
            share_LE=None if share_LE is None else share_LE.to(self.device),
            token_mask_T=None if part.real_S.all() else self._tensor(part.real_S),
            margins=margins,
            capture=capture,
        )
        context = context_of(part, self.world.layout.context_kind, self.world.context_group, self.device)
        with self._passes.autocast(self.device):
            hidden_1SD = model.hidden(
                self._tensor(part.tokens_S).unsqueeze(0), self._tensor(part.positions_S).unsqueeze(0), context
            )
            hidden_RD = hidden_1SD[0].index_select(0, self._tensor(part.source_R))
            targets_R = self._tensor(part.targets_R)
            if temperature_R is not None:
                temperature_R = temperature_R[torch.from_numpy(part.target_index_R)].to(self.device)
            if not hasattr(model, "target_logps"):  # an architecture of somebody's own need not have it
                return target_logps(model.logits(hidden_RD), targets_R, temperature_R)
            chunk_rows = self._passes.chunk_rows(model.sizes.vocab_size)
            return model.target_logps(hidden_RD, targets_R, temperature_R, chunk_rows)

    def logps(self, part: Slice, temperature_R: Tensor | None = None, **how: Any) -> tuple[Tensor, Tensor]:
        """`forward` of all ranks of the context together: of all targets of the micro-batch."""
        logps_R, entropy_R = self(part, temperature_R=temperature_R, **how)
        if not torch.is_grad_enabled():
            self._let_go()
        return self.of_targets(logps_R, part), self.of_targets(entropy_R, part)

    def _let_go(self) -> None:
        """Give up gathered weights, of which FSDP keeps those of the last layers for the backward pass.

        Where none follows, the next step would find them as they were before the optimizer.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

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


def _norm_as_they_come(model: Any) -> None:
    """Give norms weights of their input's dtype: of float32 ones autocast makes no kernel, but a chain of operators.

    On a card autocast has norms give float32, sums of which they take in any case. What goes through all experts would
    be twice as wide, and what blocks hand on would be float32 from the first block of experts on; only the norms within
    attention stay so, as its kernels round what they take anyway; where it is on, `turned.py` takes their place.
    """

    def forward(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        weight = None if norm.weight is None else norm.weight.to(x.dtype)
        return F.rms_norm(x, list(norm.normalized_shape), weight, norm.eps)

    def forward_alike(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return forward(norm, x)

    for name, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = MethodType(forward if ".attention." in name else forward_alike, module)
        turn_at_once(module)


def shard(
    model: Model,
    world: World,
    checkpointing: recompute.Checkpointing = "none",
    compiler: str | None = None,
    passes: Passes = DEFAULT_PASSES,
) -> Ranked:
    """Spread `model`, which is whole and the same on all ranks, in place. `compiler`: torch's name of a backend.

    On meta it is without weights, and each rank gets room for its part alone, which `filling.py` or a checkpoint fills.
    """
    world.layout.check_heads(model.sizes.n_heads, model.sizes.n_kv_heads)
    expert_mesh = world.dims and world.dims.get_optional_mesh("ep")
    if expert_mesh is not None:
        _spread_experts(model, expert_mesh)
    recompute.apply(checkpointing, model)
    if compiler is not None:
        for block in model.layers.values():  # pyright: ignore[reportAttributeAccessIssue]
            block.compile(backend=compiler)
    if passes.bfloat16:
        _norm_as_they_come(model)
    ranked = Ranked(model, world, passes)
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
            # A plain sum, which a factor of 1 is. Otherwise it travels as PREMUL_SUM, which gloo has not, and NCCL
            # would multiply for nothing.
            module.set_force_sum_reduction_for_comms(True)
    if any(parameter.is_meta for parameter in ranked.parameters()):
        ranked.to_empty(device=world.device)
        set_tables(ranked, world.device)
    ranked.device = world.device
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
            local = local if local.is_meta else local.to(mesh.device_type)
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
    squares = [torch.zeros((), device=ranked.device)]
    if parts and ranked.device.type == "cuda":  # where each is read once, and nothing as large is written
        squares = [norm.square() for norm in torch._foreach_norm(parts)]  # pyright: ignore[reportPrivateImportUsage]
    elif parts:
        squares = [grad.square().sum() for grad in parts]
    return ranked.world.sum(torch.stack(squares).sum()).sqrt()


@torch.no_grad()
def scale_gradient(ranked: Ranked, factor: float) -> None:
    """Multiply all of it."""
    for parameter in ranked.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
