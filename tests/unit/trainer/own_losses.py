"""Losses of a user's, good and bad."""

from __future__ import annotations

import torch

from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals

NOT_A_FUNCTION = 5


def plain(tokens: LossTokens, totals: StepTotals, *, scale: float = 1.0) -> LossTerms:
    loss = -scale * (tokens.advantage_T * tokens.new_logp_T).sum() / totals.token_count
    return LossTerms(loss, torch.zeros_like(tokens.new_logp_T, dtype=torch.bool), {"seen": float(len(loss.shape) + 1)})


def no_terms(tokens: LossTokens, totals: StepTotals) -> torch.Tensor:
    return tokens.new_logp_T.sum()


def by_token(tokens: LossTokens, totals: StepTotals) -> LossTerms:
    return LossTerms(tokens.new_logp_T, torch.zeros(3, dtype=torch.bool))


def without_gradient(tokens: LossTokens, totals: StepTotals) -> LossTerms:
    return LossTerms(tokens.new_logp_T.detach().sum(), torch.zeros(len(tokens.new_logp_T), dtype=torch.bool))
