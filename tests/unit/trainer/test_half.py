"""Passes in bfloat16: how wide what layers hand on is, where norms would give float32 as a card's autocast has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from slipstream.trainer.loss_config import ClippedLossConfig
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.step import Learner

from .tiny import BASE, OPTIM, sequence, tiny_model


class AutocastOfCards(TorchFunctionMode):
    """A CPU's autocast leaves norms alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        return given.float() if func is F.rms_norm and torch.is_autocast_enabled("cpu") else given


def test_blocks_and_experts_hand_on_bfloat16():
    model: Any = tiny_model()
    found: dict[Any, torch.dtype] = {}

    def made(layer: Any, _: Any, output: torch.Tensor) -> None:
        found[layer] = output.dtype

    def taken(experts: Any, inputs: Any) -> None:
        found[experts] = inputs[0].dtype

    for layer in model.layers.values():
        layer.register_forward_hook(made)
        layer.moe.routed_experts.inner_experts.register_forward_pre_hook(taken)
    learner = Learner(model, OPTIM, ClippedLossConfig(), passes=Passes(bfloat16=True))
    batch = [sequence(index, advantage=(-1.0) ** index) for index in range(4)]
    with AutocastOfCards():
        figures = learner.train([batch], step=1, loss_token_count=20, trained=BASE)
    assert figures["grad_norm"] > 0
    assert len(found) == 2 * len(model.layers)
    assert set(found.values()) == {torch.bfloat16}
