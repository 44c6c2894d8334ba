"""Weights in bfloat16, rounded once a step: what products of all its micro-batches take.

    rounded = RoundedWeights(model, enabled=True)
    rounded.refresh()               # copies of the weights as they are now
    with rounded.in_place():        # modules have the copies as their parameters
        loss = forward(micro_batch)
        loss.backward()             # gradients go to the weights, and add up there in float32

Autocast rounds each weight in the forward pass, and once more where a block is computed again, and makes each gradient
float32 before it is added: of 5B weights, a tenth of a micro-batch of 16k tokens on a card. What comes out is the same.
Copies cost 2 bytes a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.fp8.modules import EMULATED
from slipstream.models.routing import Routes
from slipstream.models.titan import GroupedExperts

FUSED_ON = {"cuda"}
"""Devices on which a kernel adds gradients up."""


@dataclass(frozen=True)
class _Place:
    """A parameter of a module, and what stands for it."""

    module: nn.Module
    name: str
    weight: nn.Parameter
    copy: nn.Parameter


class RoundedWeights:
    """Copies of the weights of linear layers and experts. Not of routers, which compute in float32."""

    def __init__(self, model: Any, *, enabled: bool) -> None:
        self._model = model if enabled else None
        self._places: list[_Place] | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights as they are. To be called whenever they may have changed: no copy is of an earlier step."""
        if self._model is None:
            return
        if self._places is None:
            self._places = _places(self._model)
        for place in self._places:
            place.copy.copy_(place.weight)
            place.copy.grad = None  # of a pass that failed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """To be open during passes, the backward pass included, which may compute blocks again."""
        places = self._places or []
        try:
            for place in places:
                place.module._parameters[place.name] = place.copy
            yield
        finally:
            for place in places:
                place.module._parameters[place.name] = place.weight


def _places(model: Any) -> list[_Place]:
    routers = [
        each for each in model.modules() if each is not model and isinstance(getattr(each, "routes", None), Routes)
    ]
    exact = {id(module) for router in routers for module in router.modules()}
    copies: dict[int, nn.Parameter] = {}
    places: list[_Place] = []
    for module in model.modules():
        if not isinstance(module, nn.Linear | GroupedExperts) or id(module) in exact:
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or weight.dtype is not torch.float32 or _rounds_itself(module, weight):
                continue
            if id(weight) not in copies:
                copies[id(weight)] = _copy_of(weight)
            places.append(_Place(module, name, weight, copies[id(weight)]))
    return places


def _rounds_itself(module: Any, weight: Tensor) -> bool:
    """Whether it makes FP8 of float32 by itself: of bfloat16 that would be something else."""
    return hasattr(module, EMULATED) and (getattr(module, EMULATED) or weight.device.type == "cpu")


def _copy_of(weight: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
    if weight.requires_grad:
        copy.register_post_accumulate_grad_hook(_hand_on(weight))
    return copy


def _hand_on(weight: nn.Parameter) -> Callable[[Tensor], None]:
    """What adds the gradient of a copy to that of its weight."""

    def hand_on(copy: Tensor) -> None:
        grad, copy.grad = copy.grad, None
        assert grad is not None
        if weight.grad is None:
            weight.grad = grad.float()
        else:
            add_rounded(weight.grad, grad)

    return hand_on


@torch.no_grad()
def add_rounded(total: Tensor, part: Tensor) -> None:
    """Add a tensor in bfloat16 to one in float32, in place, in one pass over both."""
    if total.device.type in FUSED_ON and total.is_contiguous() and part.is_contiguous():
        from slipstream.trainer.sum_kernels import add  # loads the compiler

        add(total, part)
    else:
        total.add_(part)
