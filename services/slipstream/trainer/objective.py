"""From `[trainer.loss]` to the function that a step minimises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from slipstream.algorithms.divergence import distillation_loss
from slipstream.algorithms.losses import (
    cispo_loss,
    clipped_loss,
    icepop_loss,
    masked_ratio_loss,
    token_truncated_loss,
)
from slipstream.algorithms.objective import Loss, Objective
from slipstream.algorithms.sequence_losses import gspo_loss, sequence_truncated_loss
from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals
from slipstream.common.config import ConfigError
from slipstream.common.imports import import_callable
from slipstream.trainer.loss_config import ImportedLossConfig, LossConfig

WHERE = "trainer.loss.path"

LOSSES: dict[str, Callable[..., LossTerms]] = {
    "masked_ratio": masked_ratio_loss,
    "clipped": clipped_loss,
    "ppo": clipped_loss,
    "grpo": partial(clipped_loss, over="sequences"),
    "dr_grpo": partial(clipped_loss, over="fixed_length"),
    "dapo": clipped_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "token_truncated": token_truncated_loss,
    "sequence_truncated": sequence_truncated_loss,
    "icepop": icepop_loss,
    "distillation": distillation_loss,
}
"""By the `type` of their configuration."""


def build_objective(config: LossConfig) -> Objective:
    """The objective, its options bound. Raises `ConfigError` for a loss of the user's that cannot be used."""
    if isinstance(config, ImportedLossConfig):
        loss = _checked(import_callable(config.path, WHERE), config)
        _try(loss, config)
    else:
        loss = partial(LOSSES[config.type], **config.arguments())
    return Objective(loss, config.reference_kl_coefficient, config.reference_kl_estimator)


def _checked(function: Callable[..., object], config: ImportedLossConfig) -> Loss:
    """The user's function, held to its contract: a mistake is named at the first micro-batch."""

    def loss(tokens: LossTokens, totals: StepTotals, /) -> LossTerms:
        terms = function(tokens, totals, **config.arguments())
        if not isinstance(terms, LossTerms):
            raise TypeError(f"{config.path} returns {type(terms).__name__}, not LossTerms")
        if terms.loss.ndim or terms.inactive_T.shape != tokens.sequence_T.shape:
            shapes = f"a loss of shape {tuple(terms.loss.shape)} and inactive_T of {tuple(terms.inactive_T.shape)}"
            raise ValueError(f"{config.path} returns {shapes}; () and {tuple(tokens.sequence_T.shape)} are needed")
        return terms

    return loss


def _try(loss: Loss, config: ImportedLossConfig) -> None:
    """Call it once on three tokens. Raises `ConfigError`."""
    new_T, old_T = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True), torch.tensor([-1.1, -0.4, -2.0])
    tokens = LossTokens.of_lengths(new_T, old_T, [1.0, -1.0], [2, 1], reference_logp_T=old_T, teacher_logp_T=old_T)
    try:
        loss(tokens, StepTotals(3.0, 2.0)).loss.backward()
    except Exception as error:  # user code
        raise ConfigError(f"{WHERE}: {config.path} fails with {type(error).__name__}: {error}") from error
