"""The loss tokens of one micro-batch as losses see them, and how terms of tokens become one number.

T = loss tokens of the micro-batch, sequence after sequence; S = its sequences. Log-probabilities are natural, float32,
at the temperature that the tokens were drawn with. A sequence is whole: it is never split over micro-batches, so sums
over one are local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

Over = Literal["tokens", "sequences", "fixed_length"]
"""What a loss is the mean over; see `mean_over`."""

LOWEST_SAMPLED_LOGP = -80.0
"""Less likely tokens are never sampled: such a number is wrong, and its ratio would exceed what float32 can hold."""


@dataclass(frozen=True)
class StepTotals:
    """Denominators: of the whole step, over all micro-batches and ranks.

    So the result does not depend on how the step was split. Both are at least 1.
    """

    token_count: float
    """Loss tokens."""

    sequence_count: float = 1.0
    """Sequences with loss tokens."""


@dataclass(frozen=True)
class LossTokens:
    """What there is to know of each loss token. Only `new_logp_T` has a gradient."""

    new_logp_T: Tensor
    """`log p`: the trainer's log-probability."""

    old_logp_T: Tensor
    """`log q`: the engine's, when the token was sampled."""

    advantage_T: Tensor
    """`A`, the same for all tokens of a sequence."""

    sequence_T: Tensor
    """Int64, ascending: which of the S sequences a token is of."""

    sequence_count: int
    """S."""

    reference_logp_T: Tensor | None = None
    """The reference policy's; None where no loss asks for it."""

    teacher_logp_T: Tensor | None = None
    """The teacher's; None where no loss asks for it."""

    @classmethod
    def of_lengths(
        cls,
        new_logp_T: Tensor,
        old_logp_T: Tensor,
        advantages: Sequence[float],
        lengths: Sequence[int],
        *,
        reference_logp_T: Tensor | None = None,
        teacher_logp_T: Tensor | None = None,
    ) -> LossTokens:
        """Sequences end to end, of so many loss tokens each. Raises `ValueError` where the lengths do not add up."""
        given = (new_logp_T, old_logp_T, reference_logp_T, teacher_logp_T)
        sizes = [sum(lengths), *(len(each) for each in given if each is not None)]
        if len(advantages) != len(lengths) or len(set(sizes)) != 1:
            raise ValueError(f"{len(advantages)} advantages, {len(lengths)} lengths, tokens {sizes}")
        counts = torch.tensor(lengths, dtype=torch.int64)
        return cls(
            new_logp_T=new_logp_T,
            old_logp_T=old_logp_T,
            advantage_T=torch.tensor(advantages, dtype=torch.float32).repeat_interleave(counts),
            sequence_T=torch.arange(len(lengths)).repeat_interleave(counts),
            sequence_count=len(lengths),
            reference_logp_T=reference_logp_T,
            teacher_logp_T=teacher_logp_T,
        ).to(new_logp_T.device)

    def to(self, device: torch.device) -> LossTokens:
        """The same on a device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    @property
    def known_T(self) -> Tensor:
        """Bool: tokens whose log-probabilities, of everyone but the trainer, are finite and at most 0.

        The engine's is also unknown below `LOWEST_SAMPLED_LOGP`.
        """
        known_T = self.old_logp_T >= LOWEST_SAMPLED_LOGP
        for logp_T in (self.old_logp_T, self.reference_logp_T, self.teacher_logp_T):
            if logp_T is not None:
                known_T = known_T & (logp_T <= 0) & torch.isfinite(logp_T)
        return known_T

    def select(self, chosen_T: Tensor) -> LossTokens:
        """Those tokens alone, of the same S sequences, some of which may be left with none."""
        return replace(self, **{name: tensor[chosen_T] for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


@dataclass(frozen=True)
class LossTerms:
    """A loss to call `backward` on, and what is reported of it."""

    loss: Tensor
    """Scalar: this micro-batch's part of the step's loss. Parts add up."""

    inactive_T: Tensor
    """Bool: tokens whose policy-gradient term has no gradient, being masked or clipped."""

    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further figures by name. Like the loss, they add up over micro-batches."""


def sum_by_sequence(values_T: Tensor, tokens: LossTokens) -> Tensor:
    """`[S]`: sums over the tokens of each sequence; 0 where there is none. Has a gradient."""
    return values_T.new_zeros(tokens.sequence_count).index_add(0, tokens.sequence_T, values_T)


def mean_by_sequence(values_T: Tensor, tokens: LossTokens) -> Tensor:
    """`[S]`: means over the tokens of each sequence; 0 where there is none. Has a gradient."""
    counts_S = torch.bincount(tokens.sequence_T, minlength=tokens.sequence_count)
    return sum_by_sequence(values_T, tokens) / counts_S.clamp(min=1)


def mean_over(
    values_T: Tensor, tokens: LossTokens, totals: StepTotals, over: Over, fixed_length_tokens: int = 1
) -> Tensor:
    """This micro-batch's part of a mean over the step. Scalar.

    * tokens: `sum(values) / N` with N tokens in the step: each token counts the same (DAPO).
    * sequences: the mean over sequences of the mean over their tokens (GRPO): tokens of long sequences count less.
    * fixed_length: `sum(values) / (sequences * fixed_length_tokens)` (Dr. GRPO): a constant, whatever was sampled.
    """
    match over:
        case "tokens":
            return values_T.sum() / totals.token_count
        case "sequences":
            return mean_by_sequence(values_T, tokens).sum() / totals.sequence_count
        case "fixed_length":
            return values_T.sum() / (totals.sequence_count * fixed_length_tokens)
