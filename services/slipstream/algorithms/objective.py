"""What a step minimises: a loss, over tokens whose log-probabilities are known, and a reference policy's KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.algorithms.divergence import Estimator, kl_estimate
from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals, mean_over


class Loss(Protocol):
    """A loss with its options bound: this package's, or anybody's."""

    def __call__(self, tokens: LossTokens, totals: StepTotals, /) -> LossTerms:
        """The part of one micro-batch, which may have no token. Pure."""
        ...


@dataclass(frozen=True)
class Objective:
    """loss + reference_kl_coefficient * KL(p || reference), the KL as a mean over the step's tokens."""

    loss: Loss
    reference_kl_coefficient: float = 0.0
    reference_kl_estimator: Estimator = "k3"

    def __call__(self, tokens: LossTokens, totals: StepTotals) -> LossTerms:
        """The part of one micro-batch.

        Tokens of which anyone's log-probability is unknown (`LossTokens.known_T`) are left out, count as inactive,
        and are counted in the figure `logps_unknown`. They stay in the denominators. `reference_kl` is the k3 estimate,
        whatever the estimator. Raises `ValueError` where a KL is asked for without a reference.
        """
        known_T = tokens.known_T
        used = tokens if bool(known_T.all()) else tokens.select(known_T)
        terms = self.loss(used, totals)
        figures = {**terms.figures, "logps_unknown": float(known_T.numel() - used.sequence_T.numel())}
        loss = terms.loss
        if self.reference_kl_coefficient:
            if used.reference_logp_T is None:
                raise ValueError("the reference policy's log-probabilities are missing")
            kl_T = kl_estimate(used.new_logp_T, used.reference_logp_T, self.reference_kl_estimator)
            loss = loss + self.reference_kl_coefficient * mean_over(kl_T, used, totals, "tokens")
            shown_T = kl_estimate(used.new_logp_T.detach(), used.reference_logp_T, "k3")
            if shown_T.numel():  # of no tokens there is none: 0 would say that they are alike
                figures["reference_kl"] = float(mean_over(shown_T, used, totals, "tokens"))
        inactive_T = torch.ones_like(known_T)
        inactive_T[known_T] = terms.inactive_T
        return LossTerms(loss, inactive_T, figures)
