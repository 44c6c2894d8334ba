"""Collectives with gradients. Every rank of the group must come by, also with nothing to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return exchange(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


def exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` rows to each rank of the group and take `received[r]` from it, without gradient.

    The functional operator, as selective checkpointing keeps its results rather than send everything again.
    """
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), list(received), list(sent), group.group_name))


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`exchange` whose gradient goes back the same way."""
    return _AllToAll.apply(x, list(received), list(sent), group)


def swap_heads(x_SNH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tokens of this rank with all heads, into tokens of all ranks (rank by rank) with this rank's share of heads."""
    ranks = dist.get_world_size(group)
    count, heads, size = x_SNH.shape
    parts = x_SNH.view(count, ranks, heads // ranks, size).transpose(0, 1).reshape(ranks * count, heads // ranks, size)
    return all_to_all(parts, [count] * ranks, [count] * ranks, group)


def swap_tokens(x_TnH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back of `swap_heads`."""
    ranks = dist.get_world_size(group)
    total, heads, size = x_TnH.shape
    count = total // ranks
    parts = all_to_all(x_TnH, [count] * ranks, [count] * ranks, group)
    return parts.view(ranks, count, heads, size).transpose(0, 1).reshape(count, ranks * heads, size)
