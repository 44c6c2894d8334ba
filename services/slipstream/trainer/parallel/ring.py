"""Ring attention over packed documents: queries stay, keys and values go from rank to rank.

Forward, each rank meets every other's keys once and keeps a running softmax (arXiv:2310.01889). Backward they go round
again, with the gradients of keys and values beside them, which arrive complete at home after the last hop. A pair of
slices that share no document, or whose keys all come later, costs the hop and no product. What is masked adds an exact
zero, so a token's output depends on nothing but its own document. Products are in the dtype of what comes in, sums of
the softmax and of gradients in float32.

S = tokens of this rank, P = tokens of the rank whose keys are here, N = query heads, G = key and value heads,
H = head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.trainer.parallel.slices import Slice


@dataclass(frozen=True)
class _Places:
    """Document and position of the tokens of one rank."""

    document_S: Tensor
    position_S: Tensor

    def sees(self, keys: _Places) -> Tensor:
        """`[S, P]`: same document, and not later."""
        same_SP = self.document_S[:, None] == keys.document_S[None, :]
        return same_SP & (self.position_S[:, None] >= keys.position_S[None, :])


class Ring:
    """Keys and values go round the group."""

    def __init__(self, part: Slice, group: dist.ProcessGroup, device: torch.device) -> None:
        mine = torch.from_numpy(part.document_S), torch.from_numpy(part.positions_S)
        places = [_Places(*row) for row in _gathered(torch.stack(mine), group)]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        # One mask a hop, the same for all layers; None where there is nothing to see.
        masks = [places[rank].sees(places[(rank - hop) % ranks]) for hop in range(ranks)]
        self._masks = [mask.to(device) if bool(mask.any()) else None for mask in masks]

    def attend(self, layer: int, q_1TNH: Tensor, k_1TGH: Tensor, v_1TGH: Tensor, scale: float | None) -> Tensor:
        """Attention output of this rank's tokens."""
        scale = 1.0 / math.sqrt(q_1TNH.shape[-1]) if scale is None else scale
        q_NSH, k_GSH, v_GSH = (x[0].transpose(0, 1).to(v_1TGH.dtype) for x in (q_1TNH, k_1TGH, v_1TGH))
        # Autocast would choose dtypes by operator, and not the same ones backward: they are chosen here.
        with torch.autocast(q_1TNH.device.type, enabled=False):
            out_NSH = _Attention.apply(q_NSH, k_GSH, v_GSH, scale, self._masks, self._group)
        return out_NSH.transpose(0, 1).unsqueeze(0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        masks: Sequence[Tensor | None],
        group: dist.ProcessGroup,
    ) -> Tensor:
        out_NSH = torch.zeros(q.shape, device=q.device)
        total_NS1, best_NS1 = out_NSH.new_zeros(*q.shape[:2], 1), out_NSH.new_full((*q.shape[:2], 1), -torch.inf)
        held = torch.stack([k, v])
        for hop, mask in enumerate(masks):
            arriving = _pass_on(held, group) if hop + 1 < len(masks) else None
            if mask is not None:
                keys_NPH, values_NPH = (_repeated(x, q.shape[0]) for x in held)
                scores_NSP = ((q @ keys_NPH.mT).float() * scale).masked_fill(~mask, -torch.inf)
                new_NS1 = torch.maximum(best_NS1, scores_NSP.amax(-1, keepdim=True))
                # Rows that see nothing yet: exp(-inf), not NaN.
                pivot_NS1 = new_NS1.clamp(min=torch.finfo(torch.float32).min)
                weights_NSP = (scores_NSP - pivot_NS1).exp()
                decay_NS1 = (best_NS1 - pivot_NS1).exp()
                out_NSH = out_NSH * decay_NS1 + weights_NSP.to(q.dtype) @ values_NPH
                total_NS1 = total_NS1 * decay_NS1 + weights_NSP.sum(-1, keepdim=True)
                best_NS1 = new_NS1
            held = held if arriving is None else arriving.wait()
        out_NSH = (out_NSH / total_NS1).to(q.dtype)  # every token sees itself
        ctx.save_for_backward(q, k, v, out_NSH, best_NS1 + total_NS1.log())
        ctx.scale, ctx.masks, ctx.group = scale, masks, group
        return out_NSH

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out_NSH, log_total_NS1 = ctx.saved_tensors
        grad_NSH = grads[0].to(q.dtype)
        sums_NS1 = (grad_NSH.float() * out_NSH.float()).sum(-1, keepdim=True)
        grad_q = torch.zeros(q.shape, device=q.device)
        held, grad_held = torch.stack([k, v]), torch.zeros(2, *k.shape, device=k.device)
        for hop, mask in enumerate(ctx.masks):
            arriving = _pass_on(held, ctx.group) if hop + 1 < len(ctx.masks) else None
            if mask is not None:
                keys_NPH, values_NPH = (_repeated(x, q.shape[0]) for x in held)
                scores_NSP = ((q @ keys_NPH.mT).float() * ctx.scale).masked_fill(~mask, -torch.inf)
                weights_NSP = (scores_NSP - log_total_NS1).exp()
                grad_scores_NSP = weights_NSP * ((grad_NSH @ values_NPH.mT).float() - sums_NS1) * ctx.scale
                weights_NSP, grad_scores_NSP = weights_NSP.to(q.dtype), grad_scores_NSP.to(q.dtype)
                grad_q = grad_q + grad_scores_NSP @ keys_NPH
                grad_held[0] += _summed(grad_scores_NSP.mT @ q, k.shape[0])
                grad_held[1] += _summed(weights_NSP.mT @ grad_NSH, k.shape[0])
            grad_held = _pass_on(grad_held, ctx.group).wait()  # once more than the keys: home
            held = held if arriving is None else arriving.wait()
        return grad_q.to(q.dtype), grad_held[0].to(k.dtype), grad_held[1].to(v.dtype), None, None, None


@dataclass(frozen=True)
class _Arriving:
    """A tensor on its way from the previous rank."""

    tensor: Tensor
    works: Sequence[dist.Work]
    sent: Tensor
    """Kept until it has gone."""

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> _Arriving:
    """Send to the next rank of the group, and take from the previous one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, taken = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, taken, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    return _Arriving(taken, works, sent)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _repeated(x_GPH: Tensor, heads: int) -> Tensor:
    return x_GPH.repeat_interleave(heads // x_GPH.shape[0], 0)


def _summed(x_NPH: Tensor, groups: int) -> Tensor:
    return x_NPH.view(groups, -1, *x_NPH.shape[1:]).sum(1)
