"""Policy-gradient losses over sampled tokens: sums, divided by a denominator that the caller gives.

The denominator is the loss-token count of the whole step over all ranks, so the result does not depend on how tokens
were split into micro-batches. Notation: `p` is the trainer's probability of a sampled token and `q` the engine's when
it was sampled, `r = p / q`, `A` the advantage. T = loss tokens; other tokens are not passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """A loss to call `backward` on, and the tokens whose policy-gradient term has no gradient."""

    loss: Tensor
    """Scalar."""

    inactive_T: Tensor
    """Bool: masked or clipped tokens."""


def masked_ratio_loss(
    new_logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    denominator: float,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    kl_coefficient: float = 1e-3,
) -> LossTerms:
    """prime-rl's default loss (`default_loss_fn` in its `trainer/rl/loss.py`).

        loss = sum( -keep * r * A + kl_coefficient * (log r)^2 ) / denominator
        keep = 0 where A > 0 and p - q > mask_high, or A < 0 and p - q < -mask_low; else 1

    The mask is on the difference of probabilities, which bounds the total variation, and not on the ratio, which rare
    tokens exceed by chance. The ratio is not clamped. Masked tokens keep the squared term.
    """
    log_ratio_T = new_logp_T - old_logp_T
    with torch.no_grad():
        difference_T = new_logp_T.exp() - old_logp_T.exp()
        masked_T = ((advantage_T > 0) & (difference_T > mask_high)) | ((advantage_T < 0) & (difference_T < -mask_low))
    gain_T = log_ratio_T.exp() * advantage_T
    terms_T = kl_coefficient * log_ratio_T.square() - gain_T.masked_fill(masked_T, 0.0)
    return LossTerms(terms_T.sum() / denominator, masked_T)


def clipped_loss(
    new_logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
) -> LossTerms:
    """PPO's clipped surrogate (arXiv:1707.06347), asymmetric as in DAPO (arXiv:2503.14476), with dual clip.

        gain = min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)
        gain = max(gain, dual_clip * A) where A < 0
        loss = -sum(gain) / denominator

    The dual clip (arXiv:1912.09729) bounds what one token with negative advantage and large ratio can do.
    """
    ratio_T = (new_logp_T - old_logp_T).exp()
    plain_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_T
    gain_T = torch.minimum(plain_T, clipped_T)
    floor_T = torch.where(advantage_T < 0, dual_clip * advantage_T, -torch.inf)
    gain_T = torch.maximum(gain_T, floor_T)
    inactive_T = ((advantage_T > 0) & (ratio_T > 1.0 + clip_high)) | (
        (advantage_T < 0) & ((ratio_T < 1.0 - clip_low) | (ratio_T > dual_clip))
    )
    return LossTerms(-gain_T.sum() / denominator, inactive_T.detach())
