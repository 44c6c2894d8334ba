"""Policy-gradient losses of single tokens: pure functions of (tokens, totals, options).

Notation: `p` is the trainer's probability of a sampled token and `q` the engine's when it was sampled, `r = p / q`, `A`
the advantage. A step is trained once, so `q` stands for the papers' old policy, and holds the engine's rounding and the
policy's lag alike. Shapes and denominators are those of `tokens.py`. Losses of whole sequences: `sequence_losses.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.tokens import LossTerms, LossTokens, Over, StepTotals, mean_over


def masked_ratio_loss(
    tokens: LossTokens,
    totals: StepTotals,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    kl_coefficient: float = 1e-3,
) -> LossTerms:
    """prime-rl's default loss (`default_loss_fn` in its `trainer/rl/loss.py`).

        loss = sum( -keep * r * A + kl_coefficient * (log r)^2 ) / tokens of the step
        keep = 0 where A > 0 and p - q > mask_high, or A < 0 and p - q < -mask_low; else 1

    The mask is on the difference of probabilities, which bounds the total variation, and not on the ratio, which rare
    tokens exceed by chance. The ratio is not clamped. Masked tokens keep the squared term.
    """
    advantage_T = tokens.advantage_T
    log_ratio_T = tokens.new_logp_T - tokens.old_logp_T
    with torch.no_grad():
        difference_T = tokens.new_logp_T.exp() - tokens.old_logp_T.exp()
        masked_T = ((advantage_T > 0) & (difference_T > mask_high)) | ((advantage_T < 0) & (difference_T < -mask_low))
    gain_T = log_ratio_T.exp() * advantage_T
    terms_T = kl_coefficient * log_ratio_T.square() - gain_T.masked_fill(masked_T, 0.0)
    return LossTerms(mean_over(terms_T, tokens, totals, "tokens"), masked_T)


def clipped_loss(
    tokens: LossTokens,
    totals: StepTotals,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    over: Over = "tokens",
    fixed_length_tokens: int = 1,
) -> LossTerms:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), the core of GRPO, Dr. GRPO and DAPO.

        gain = min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)
        gain = max(gain, dual_clip * A) where A < 0 and there is a dual clip
        loss = -mean_over(gain)

    GRPO (arXiv:2402.03300, eq. 3) is `over="sequences"`, Dr. GRPO (arXiv:2503.20783, section 3.2)
    `over="fixed_length"`, DAPO (arXiv:2503.14476, eq. 8) `over="tokens"` with `clip_high` above `clip_low`. The dual
    clip (arXiv:1912.09729, eq. 5) bounds what one token with negative advantage and large ratio can do.
    """
    advantage_T = tokens.advantage_T
    ratio_T = (tokens.new_logp_T - tokens.old_logp_T).exp()
    gain_T, inactive_T = clipped_gain(ratio_T, advantage_T, clip_low, clip_high)
    if dual_clip is not None:
        floor_T = torch.where(advantage_T < 0, dual_clip * advantage_T, -torch.inf)
        gain_T = torch.maximum(gain_T, floor_T)
        inactive_T = inactive_T | ((advantage_T < 0) & (ratio_T > dual_clip))
    return LossTerms(mean_over(-gain_T, tokens, totals, over, fixed_length_tokens), inactive_T.detach())


def clipped_gain(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """`min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)`, and where it has no gradient. Any shape."""
    gain = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage)
    clipped = ((advantage > 0) & (ratio > 1.0 + clip_high)) | ((advantage < 0) & (ratio < 1.0 - clip_low))
    return gain, clipped


def cispo_loss(tokens: LossTokens, totals: StepTotals, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossTerms:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): the weight is clipped, and no token loses its gradient.

        loss = -sum( clamp(r, 1 - clip_low, 1 + clip_high) * A * log p ) / tokens of the step

    without gradient through the weight. `clip_low = 1` sets no lower bound, as in the paper.
    """
    weight_T = (tokens.new_logp_T - tokens.old_logp_T).detach().exp().clamp(1.0 - clip_low, 1.0 + clip_high)
    return _weighted(weight_T, tokens, totals)


def token_truncated_loss(tokens: LossTokens, totals: StepTotals, *, ratio_cap: float = 2.0) -> LossTerms:
    """Token-level truncated importance sampling (fengyao.notion.site/off-policy-rl, "TIS").

        loss = -sum( min(r, ratio_cap) * A * log p ) / tokens of the step

    without gradient through the weight. No token loses its gradient; above the cap it is smaller than it should be.
    """
    weight_T = (tokens.new_logp_T - tokens.old_logp_T).detach().exp().clamp(max=ratio_cap)
    return _weighted(weight_T, tokens, totals)


def icepop_loss(
    tokens: LossTokens, totals: StepTotals, *, ratio_low: float = 0.5, ratio_high: float = 5.0
) -> LossTerms:
    """IcePop (Ring-1T, arXiv:2510.18855; in this form INTELLECT-3, arXiv:2512.16144, eq. 1).

        loss = -sum( M(r) * A ) / tokens of the step,   M(r) = r where ratio_low <= r <= ratio_high, else 0

    Tokens on which engine and trainer disagree too much are dropped, whatever the sign of their advantage.
    """
    ratio_T = (tokens.new_logp_T - tokens.old_logp_T).exp()
    outside_T = ((ratio_T < ratio_low) | (ratio_T > ratio_high)).detach()
    gain_T = (ratio_T * tokens.advantage_T).masked_fill(outside_T, 0.0)
    return LossTerms(mean_over(-gain_T, tokens, totals, "tokens"), outside_T)


def likelihood_loss(tokens: LossTokens, totals: StepTotals) -> LossTerms:
    """`-log p`, a mean over the step's tokens: supervised learning, in which nobody sampled and `A` means nothing."""
    inactive_T = torch.zeros_like(tokens.sequence_T, dtype=torch.bool)
    return LossTerms(mean_over(-tokens.new_logp_T, tokens, totals, "tokens"), inactive_T)


def _weighted(weight_T: Tensor, tokens: LossTokens, totals: StepTotals) -> LossTerms:
    terms_T = -weight_T * tokens.advantage_T * tokens.new_logp_T
    return LossTerms(mean_over(terms_T, tokens, totals, "tokens"), weight_T == 0)
