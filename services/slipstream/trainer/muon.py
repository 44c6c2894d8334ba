"""Muon for matrices, stacked ones, and sharded ones.

torch.optim.Muon takes single whole matrices. Here a parameter of more dimensions is a stack of matrices (the experts of
a layer), each orthogonalised by itself, all in one batched product; of a DTensor whose matrices are cut over ranks, the
update is gathered, orthogonalised on every rank, and cut again: one all-gather a step of such a parameter.
Otherwise the arithmetic is torch's, with its `match_rms_adamw` rate, so that rates and decay made for AdamW fit.

N = matrices of a stack, A x B = their shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

STATE = "muon_momentum"
"""What it keeps of a parameter; SGD's is called otherwise, so that neither takes up the other's."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
RMS_OF_ADAMW = 0.2


class Muon(Optimizer):
    """Momentum with Nesterov's correction, orthogonalised; decoupled weight decay."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step. Collective where parameters are sharded: every rank calls it, with the same parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if STATE not in state:
            state[STATE] = torch.zeros_like(gradient)
        buffer, lr = local(state[STATE]), group["lr"]
        buffer.lerp_(local(gradient), 1 - group["momentum"])
        update = local(gradient).lerp(buffer, group["momentum"])
        target = local(parameter)
        target.mul_(1 - lr * group["weight_decay"])
        rate = lr * RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:]))
        target.add_(_orthogonalised(update, parameter), alpha=-rate)


def local(tensor: Tensor) -> Tensor:
    """This rank's part; the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonalised(update: Tensor, like: Tensor) -> Tensor:
    """Of this rank's part of an update, placed as `like` is."""
    if not isinstance(like, DTensor):
        return orthogonalise(update)
    mesh, placements = like.device_mesh, like.placements
    matrix_dims = (like.ndim - 2, like.ndim - 1)
    whole = [Replicate() if getattr(each, "dim", None) in matrix_dims else each for each in placements]
    if whole == list(placements):
        return orthogonalise(update)
    cut = DTensor.from_local(update, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    gathered = cut.redistribute(mesh, whole)
    made = orthogonalise(gathered.to_local())
    again = DTensor.from_local(made, mesh, whole, run_check=False, shape=like.shape, stride=like.stride())
    return again.redistribute(mesh, placements).to_local()


def orthogonalise(update: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each `[..., A, B]`, roughly: singular values come to lie in 0.5 to 1.5.

    Newton-Schulz iteration in bfloat16, as in torch.optim.Muon.
    """
    if not update.numel():
        return update
    a, b, c = COEFFICIENTS
    x_NAB = update.reshape(-1, *update.shape[-2:]).bfloat16()
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    if tall:
        x_NAB = x_NAB.mT
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram_NAA = x_NAB @ x_NAB.mT
        gram_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        x_NAB = torch.baddbmm(x_NAB, gram_NAA, x_NAB, beta=a)
    return (x_NAB.mT if tall else x_NAB).reshape(update.shape).to(update.dtype)
