"""Weights in bfloat16, rounded once a step: what products of all its micro-batches take.

    rounded = RoundedWeights(model, enabled=True)
    rounded.refresh()               # copies of the weights as they are now
    with rounded.in_place():        # modules have the copies as their parameters
        loss = forward(micro_batch)
        loss.backward()             # gradients go to the weights, and add up there in float32

Autocast rounds each weight in the forward pass, and once more where a block is computed again, and makes each gradient
float32 before it is added: of 5B weights, 6 % of a step of eight micro-batches of 16k tokens on an H200. What comes out
is the same. Copies cost 2 bytes a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from slipstream.models.fp8.modules import EMULATED
from slipstream.models.routing import Routes
from slipstream.models.titan import GroupedExperts

log = structlog.get_logger()

FUSED_ON = {"cuda"}
"""Devices on which a kernel adds gradients up."""

STATE_BYTES = 12
"""Of each number that learns, which come after the weights: its gradient and two moments."""
SHARE = 0.25
"""Of what a card has free beside those, what copies may take where nobody says."""


@dataclass(frozen=True)
class _Place:
    """A parameter of a module, and what stands for it."""

    module: nn.Module
    name: str
    weight: nn.Parameter
    copy: nn.Parameter


class RoundedWeights:
    """Copies of the weights of linear layers and experts. Not of routers, which compute in float32."""

    def __init__(self, model: Any, *, enabled: bool | None) -> None:
        """`enabled`: None where the card has room. To be made before the optimizer has moments."""
        self._rounded = [] if enabled is False else list(_rounded(model))
        if enabled is None and not _fits(model, [weight for *_, weight in self._rounded]):
            self._rounded = []
        self._places: list[_Place] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights as they are. To be called whenever they may have changed: no copy is of an earlier step."""
        if not self._places:
            copies = {weight: _copy_of(weight) for *_, weight in self._rounded}
            self._places = [_Place(module, name, weight, copies[weight]) for module, name, weight in self._rounded]
        for place in self._places:
            place.copy.copy_(place.weight)
            place.copy.grad = None  # of a pass that failed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """To be open during passes, the backward pass included, which may compute blocks again."""
        try:
            for place in self._places:
                place.module._parameters[place.name] = place.copy
            yield
        finally:
            for place in self._places:
                place.module._parameters[place.name] = place.weight


def affordable(copies_bytes: int, learning: int, free_bytes: int) -> bool:
    """Whether copies of so many bytes go beside what so many numbers that learn still need."""
    return copies_bytes <= SHARE * (free_bytes - STATE_BYTES * learning)


def _fits(model: Any, weights: list[nn.Parameter]) -> bool:
    """True on a CPU."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return True
    copies_bytes = sum(2 * weight.numel() for weight in set(weights))
    learning = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    fits = affordable(copies_bytes, learning, torch.cuda.mem_get_info(device)[0])
    log.info("weights_rounded", once=fits, copies_bytes=copies_bytes)
    return fits


def _rounded(model: Any) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters of which products take a rounded copy, in their modules."""
    routers = [
        each for each in model.modules() if each is not model and isinstance(getattr(each, "routes", None), Routes)
    ]
    exact = {id(module) for router in routers for module in router.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear | GroupedExperts) and id(module) not in exact:
            for name, weight in module.named_parameters(recurse=False):
                if weight.ndim > 1 and weight.dtype is torch.float32 and not _rounds_itself(module, weight):
                    yield module, name, weight


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
