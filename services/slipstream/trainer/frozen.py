"""Models beside the one that is trained, whose weights stay: the reference policy and the teacher. On the torch thread.

Each costs its weights in memory and a forward pass over every micro-batch, and only exists where the loss asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.base import Model
from slipstream.models.checkpoint import load_model
from slipstream.models.registry import load_sizes
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.packed import Packed, pack, target_logps, temperatures
from slipstream.trainer.sequence import TrainSequence
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
        if config.loss.reference_kl_coefficient:
            reference = _freeze(load_model(load_sizes(config.model_dir), config.model_dir))
        if config.loss.type == "distillation":
            teacher = _freeze(load_model(teacher_sizes(config, config.loss.teacher), config.loss.teacher))
        return cls(reference, teacher)

    @torch.no_grad()
    def logps(self, batch: Sequence[TrainSequence], packed: Packed) -> dict[str, Tensor]:
        """`[R]` each: their log-probabilities of a micro-batch's targets, by the names that `LossTokens` has."""
        found: dict[str, Tensor] = {}
        if self.reference is not None:
            found["reference_logp_T"] = _logps(self.reference, packed, batch)
        if self.teacher is not None:
            found["teacher_logp_T"] = _logps(self.teacher, pack(batch, replay=False), batch)
        return found


def _freeze(model: Model) -> Model:
    model.requires_grad_(False)
    model.eval()
    return model


def _logps(model: Model, packed: Packed, batch: Sequence[TrainSequence]) -> Tensor:
    return target_logps(packed.logits_RV(model), packed.targets_R, temperatures(batch))[0]
