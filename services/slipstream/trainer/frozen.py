"""Models beside the one that is trained, whose weights stay: the reference policy and the teacher. On the torch thread.

Each costs its weights in memory and a forward pass over every micro-batch, and only exists where the loss asks for it.
Several ranks share its weights and its tokens as they do those of the trained model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.models.base import Model
from slipstream.models.checkpoint import load_model
from slipstream.models.registry import load_sizes
from slipstream.trainer.compute import device_of
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.parallel.sharding import DEFAULT_PASSES, Passes, Ranked, shard
from slipstream.trainer.parallel.slices import Slice
from slipstream.trainer.parallel.world import World
from slipstream.trainer.teacher import teacher_sizes


@dataclass(frozen=True)
class FrozenModels:
    """Those that a loss asks for."""

    reference: Model | None = None
    """What step 1 started from. Recorded routes are replayed in it, so that its KL is of weights, not of routes."""

    teacher: Model | None = None
    """Routed live: its experts are others."""

    @classmethod
    def load(cls, config: TrainerConfig) -> FrozenModels:
        """Read them from disk; the run's model directory holds the start of step 1. Raises `ConfigError`."""
        reference = teacher = None
        device = device_of(config.compute, config.group.place)
        if config.loss.reference_kl_coefficient:
            reference = _freeze(load_model(load_sizes(config.model_dir), config.model_dir), device)
        if config.loss.type == "distillation" and not config.teacher_pool:
            teacher = _freeze(load_model(teacher_sizes(config, config.loss.teacher), config.loss.teacher), device)
        return cls(reference, teacher)


class FrozenLogps:
    """What frozen models say of the targets of a micro-batch."""

    def __init__(self, models: FrozenModels, world: World, passes: Passes = DEFAULT_PASSES) -> None:
        self._reference = None if models.reference is None else shard(models.reference, world, passes=passes)
        self._teacher = None if models.teacher is None else shard(models.teacher, world, passes=passes)

    @torch.no_grad()
    def __call__(self, part: Slice, temperature_R: Tensor | None) -> dict[str, Tensor]:
        """Log-probabilities of all targets of the micro-batch, by the names that `LossTokens` has."""
        found: dict[str, Tensor] = {}
        if self._reference is not None:
            found["reference_logp_T"] = _logps(self._reference, part, temperature_R)
        if self._teacher is not None:
            found["teacher_logp_T"] = _logps(self._teacher, part, temperature_R, replay=False)
        return found


def _freeze(model: Any, device: torch.device) -> Model:
    model.to(device)
    model.requires_grad_(False)
    model.eval()
    return model


def _logps(model: Ranked, part: Slice, temperature_R: Tensor | None, *, replay: bool = True) -> Tensor:
    return model.logps(part, temperature_R, replay=replay)[0]
