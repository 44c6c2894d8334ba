"""One small step for the tests of losses, as plain numbers and as tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slipstream.algorithms.losses import cispo_loss, clipped_loss, icepop_loss, masked_ratio_loss, token_truncated_loss
from slipstream.algorithms.sequence_losses import gspo_loss, sequence_truncated_loss
from slipstream.algorithms.tokens import LossTokens, StepTotals


@dataclass(frozen=True)
class Sequence:
    """One advantage, and (p, q) of each loss token."""

    advantage: float
    tokens: tuple[tuple[float, float], ...]


# Both signs; ratios within bounds, on either side of them, and far beyond; one token; an advantage of 0; equal p and q.
STEP = (
    Sequence(1.0, ((0.50, 0.50), (0.90, 0.50), (0.10, 0.50), (0.52, 0.50))),
    Sequence(-1.0, ((0.10, 0.50), (0.90, 0.50), (0.45, 0.50))),
    Sequence(-0.5, ((0.80, 0.10),)),
    Sequence(0.0, ((0.30, 0.50), (0.60, 0.50))),
    Sequence(2.0, ((0.55, 0.50), (0.99, 0.12))),
)
TOTALS = StepTotals(token_count=20.0, sequence_count=8.0)
"""More than `STEP` has: other ranks have the rest."""

LOSSES = {
    "masked_ratio": masked_ratio_loss,
    "clipped": lambda tokens, totals: clipped_loss(tokens, totals, clip_high=0.28, dual_clip=3.0),
    "ppo": clipped_loss,
    "grpo": lambda tokens, totals: clipped_loss(tokens, totals, over="sequences"),
    "dr_grpo": lambda tokens, totals: clipped_loss(tokens, totals, over="fixed_length", fixed_length_tokens=16),
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "token_truncated": token_truncated_loss,
    "sequence_truncated": sequence_truncated_loss,
    "icepop": icepop_loss,
}


def tensors(step: tuple[Sequence, ...] = STEP) -> LossTokens:
    pairs = [pair for sequence in step for pair in sequence.tokens]
    new = torch.tensor([math.log(p) for p, _ in pairs], requires_grad=True)
    old = torch.tensor([math.log(q) for _, q in pairs])
    return LossTokens.of_lengths(new, old, [s.advantage for s in step], [len(s.tokens) for s in step])


def gradient(tokens: LossTokens) -> list[float]:
    assert tokens.new_logp_T.grad is not None
    return tokens.new_logp_T.grad.tolist()


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
