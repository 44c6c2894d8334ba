"""Policy-gradient losses whose ratio is of a whole sequence. Notation and shapes as in `losses.py` and `tokens.py`."""

from __future__ import annotations

from slipstream.algorithms.losses import clipped_gain
from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals, mean_by_sequence, mean_over, sum_by_sequence


def gspo_loss(tokens: LossTokens, totals: StepTotals, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossTerms:
    """GSPO (arXiv:2507.18071, eq. 5 and 7): the clip is of the sequence's ratio, its length taken out.

        s = exp( mean over the sequence's tokens of log r )
        loss = -sum over sequences( min(s A, clamp(s, 1 - clip_low, 1 + clip_high) A) ) / sequences of the step

    The bounds are the paper's (section 5.1): means of log ratios are far nearer to 0 than single ones. A clipped
    sequence takes all its tokens with it. A sequence without loss tokens adds nothing.
    """
    ratio_S = mean_by_sequence(tokens.new_logp_T - tokens.old_logp_T, tokens).exp()
    advantage_S = mean_by_sequence(tokens.advantage_T, tokens)
    gain_S, clipped_S = clipped_gain(ratio_S, advantage_S, clip_low, clip_high)
    return LossTerms(-gain_S.sum() / totals.sequence_count, clipped_S.detach()[tokens.sequence_T])


def sequence_truncated_loss(tokens: LossTokens, totals: StepTotals, *, ratio_cap: float = 2.0) -> LossTerms:
    """Sequence-level truncated importance sampling ("When Speed Kills Stability", Liu et al. 2025, "Seq-TIS").

        w = min( exp( sum over the sequence's tokens of log r ), ratio_cap )
        loss = -sum over tokens( w * A * log p ) / tokens of the step

    without gradient through the weight. Unbiased but for the cap, as single tokens' ratios are not; the product of many
    ratios varies much, so long sequences need a small mismatch.
    """
    ratio_S = sum_by_sequence((tokens.new_logp_T - tokens.old_logp_T).detach(), tokens).exp()
    weight_T = ratio_S.clamp(max=ratio_cap)[tokens.sequence_T]
    terms_T = -weight_T * tokens.advantage_T * tokens.new_logp_T
    return LossTerms(mean_over(terms_T, tokens, totals, "tokens"), weight_T == 0)
