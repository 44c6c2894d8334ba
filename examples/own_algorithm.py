"""A loss and advantages of one's own: what `own-algorithm.toml` names by import path. See docs/algorithms.md.

Both are called with plain data and return plain data. The loss runs in the trainer, the advantages in the orchestrator,
which has no torch: hence the import inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.algorithms.advantages import Members

if TYPE_CHECKING:
    from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals


def tanh_loss(tokens: LossTokens, totals: StepTotals, *, softness: float = 1.0) -> LossTerms:
    """A soft clip: the log ratio through a tanh, so that no token's weight changes by more than `exp(softness)`.

    loss = -sum( exp(softness * tanh(log r / softness)) * A ) / tokens of the step
    """
    from slipstream.algorithms.tokens import LossTerms

    log_ratio_T = tokens.new_logp_T - tokens.old_logp_T
    weight_T = (softness * (log_ratio_T / softness).tanh()).exp()
    loss = -(weight_T * tokens.advantage_T).sum() / totals.token_count
    far_T = log_ratio_T.detach().abs() > 3 * softness
    return LossTerms(loss, far_T, {"far_tokens": float(far_T.sum())})


def ranks(members: Members, *, spread: float = 1.0) -> list[float]:
    """Rewards by rank alone, from `-spread` to `spread`: outliers weigh no more than others. Ties share a rank."""
    ordered = sorted(members.rewards)
    last = max(len(ordered) - 1, 1)

    def rank(reward: float) -> float:
        return ordered.index(reward) + (ordered.count(reward) - 1) / 2

    return [spread * (2 * rank(reward) / last - 1) for reward in members.rewards]
