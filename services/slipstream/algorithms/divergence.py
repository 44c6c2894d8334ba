"""Terms that hold the policy near another one: a reference policy's KL, and distillation from a teacher.

`u` is the other policy's probability of the sampled token; the rest as in `losses.py`, shapes as in `tokens.py`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from slipstream.algorithms.tokens import LossTerms, LossTokens, StepTotals, mean_over

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(new_logp_T: Tensor, other_logp_T: Tensor, estimator: Estimator = "k3") -> Tensor:
    """`[T]`: estimates of KL(p || u) by one token drawn from p each (http://joschu.net/blog/kl-approx.html).

    With `d = log u - log p`: k1 = -d, unbiased, but of any sign, and its own gradient is 0 on average; k2 = d^2 / 2,
    whose gradient is that of the KL; k3 = exp(d) - 1 - d, unbiased and never negative, GRPO's choice
    (arXiv:2402.03300, eq. 4).
    """
    difference_T = other_logp_T - new_logp_T
    match estimator:
        case "k1":
            return -difference_T
        case "k2":
            return 0.5 * difference_T.square()
        case "k3":
            return difference_T.expm1() - difference_T


def distillation_loss(
    tokens: LossTokens,
    totals: StepTotals,
    *,
    kl_coefficient: float = 1.0,
    reward_coefficient: float = 0.0,
    ratio_cap: float = 2.0,
    gap_cap: float | None = None,
) -> LossTerms:
    """On-policy distillation: the reverse KL to a teacher, on what the policy itself sampled.

        a = reward_coefficient * A + kl_coefficient * clamp(log u - log p, -gap_cap, gap_cap)
        loss = -sum( min(r, ratio_cap) * a * log p ) / tokens of the step

    with gradient through the last `log p` alone: the policy gradient of KL(p || u) of each next token
    (arXiv:2306.13649, section 3.1, with the reverse KL; thinkingmachines.ai/blog/on-policy-distillation). Only the
    teacher's log-probabilities of the sampled tokens are needed. `gap_cap` bounds what one weighs that the teacher
    finds next to impossible (rLLM's `clip_advantages`); without it nothing is clamped. `teacher_kl` is the mean
    of `log p - log u`, which falls towards 0; of no tokens there is none. Raises `ValueError` without a teacher.
    """
    if tokens.teacher_logp_T is None:
        raise ValueError("distillation needs the teacher's log-probabilities")
    new_logp_T = tokens.new_logp_T.detach()
    gap_T = tokens.teacher_logp_T - new_logp_T
    bounded_T = gap_T if gap_cap is None else gap_T.clamp(-gap_cap, gap_cap)
    advantage_T = reward_coefficient * tokens.advantage_T + kl_coefficient * bounded_T
    weight_T = (new_logp_T - tokens.old_logp_T).exp().clamp(max=ratio_cap)
    loss = mean_over(-weight_T * advantage_T * tokens.new_logp_T, tokens, totals, "tokens")
    figures = {"teacher_kl": float(-gap_T.sum() / totals.token_count)} if gap_T.numel() else {}
    return LossTerms(loss, weight_T == 0, figures)
