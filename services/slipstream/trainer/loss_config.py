"""Configuration of the loss: `[trainer.loss]`, a variant chosen by `type`. Formulas: docs/algorithms.md. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig
from slipstream.common.imports import PATH_PATTERN


class BaseLossConfig(BaseConfig):
    """What every loss has beside its own options."""

    reference_kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy, the model that step 1 started from. Above 0, the trainer keeps a frozen
    copy of it and runs it over every token."""

    reference_kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that KL is estimated from sampled tokens."""

    def arguments(self) -> dict[str, Any]:
        """What the loss function itself is told."""
        return self.model_dump(exclude={"type", *BaseLossConfig.model_fields})


class MaskedRatioLossConfig(BaseLossConfig):
    """Unclamped ratio, tokens masked by the change of their probability."""

    type: Literal["masked_ratio"] = "masked_ratio"

    mask_low: float = Field(default=0.2, ge=0)
    """With a negative advantage, a token whose probability fell by more than this is masked."""

    mask_high: float = Field(default=0.2, ge=0)
    """With a positive advantage, a token whose probability rose by more than this is masked."""

    kl_coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the squared log ratio."""


class _ClipConfig(BaseLossConfig):
    """The clip of PPO."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Ratios below 1 less this are clipped."""

    clip_high: float = Field(default=0.2, ge=0)
    """Ratios above 1 plus this are clipped."""


class ClippedLossConfig(_ClipConfig):
    """DAPO's clipped ratio with dual clip."""

    type: Literal["clipped"] = "clipped"
    clip_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 plus this are clipped."""

    dual_clip: float = Field(default=3.0, gt=1)
    """Bound of the ratio where the advantage is negative."""


class PpoLossConfig(_ClipConfig):
    """PPO's clipped ratio, the mean over tokens."""

    type: Literal["ppo"] = "ppo"


class GrpoLossConfig(_ClipConfig):
    """PPO's clipped ratio, the mean over sequences of their tokens' means, with the KL to the reference."""

    type: Literal["grpo"] = "grpo"

    reference_kl_coefficient: float = Field(default=0.04, ge=0)
    """Weight of the KL to the reference policy, the model that step 1 started from. 0 saves the frozen copy."""


class DrGrpoLossConfig(_ClipConfig):
    """PPO's clipped ratio, the sum over tokens divided by sequences times a fixed length."""

    type: Literal["dr_grpo"] = "dr_grpo"

    fixed_length_tokens: int = Field(ge=1)
    """Tokens that each sequence counts for, however long it is: the most that a rollout may sample."""


class DapoLossConfig(_ClipConfig):
    """PPO's clipped ratio with more room upwards, the mean over tokens."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 plus this are clipped."""


class GspoLossConfig(BaseLossConfig):
    """PPO's clip of the sequence's mean log ratio."""

    type: Literal["gspo"] = "gspo"

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Sequence ratios below 1 less this are clipped."""

    clip_high: float = Field(default=4e-4, ge=0)
    """Sequence ratios above 1 plus this are clipped."""


class CispoLossConfig(BaseLossConfig):
    """A clipped weight on each token's log-probability; no token loses its gradient."""

    type: Literal["cispo"] = "cispo"

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Weights are at least 1 less this. 1 sets no bound."""

    clip_high: float = Field(default=4.0, ge=0)
    """Weights are at most 1 plus this."""


class _TruncatedConfig(BaseLossConfig):
    """Truncated importance sampling."""

    ratio_cap: float = Field(default=2.0, ge=1)
    """Importance weights are at most this."""


class TokenTruncatedLossConfig(_TruncatedConfig):
    """Importance sampling by token, the ratio truncated."""

    type: Literal["token_truncated"] = "token_truncated"


class SequenceTruncatedLossConfig(_TruncatedConfig):
    """Importance sampling by sequence, the product of its tokens' ratios truncated."""

    type: Literal["sequence_truncated"] = "sequence_truncated"


class IcePopLossConfig(BaseLossConfig):
    """Unclamped ratio; tokens on which trainer and engine disagree too much are dropped."""

    type: Literal["icepop"] = "icepop"

    ratio_low: float = Field(default=0.5, ge=0, le=1)
    """Tokens of a smaller ratio are dropped."""

    ratio_high: float = Field(default=5.0, ge=1)
    """Tokens of a larger ratio are dropped."""


class DistillationLossConfig(_TruncatedConfig):
    """The reverse KL to a teacher on what the policy samples, in place of rewards or beside them."""

    type: Literal["distillation"] = "distillation"

    teacher: Path
    """Model directory of the teacher. It must have the run's tokenizer. The trainer runs it over every token, or
    teacher workers do (`teacher.replicas`)."""

    kl_coefficient: float = Field(default=1.0, gt=0)
    """Weight of the teacher's part of each token's advantage."""

    gap_cap: float | None = Field(default=None, gt=0)
    """Bound of that part before it is weighed, in nats, for a teacher that finds some tokens next to impossible."""

    reward_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the reward's part. With 0, set `orchestrator.min_reward_std = 0`: groups of equal rewards teach too."""

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().arguments().items() if name != "teacher"}


class ImportedLossConfig(BaseLossConfig):
    """A loss of your own, found by import path."""

    type: Literal["import"] = "import"

    path: str = Field(pattern=PATH_PATTERN)
    """`package.module:function`; called with (tokens, totals, **options), it returns `LossTerms`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""

    def arguments(self) -> dict[str, Any]:
        return dict(self.options)


LossConfig = Annotated[
    MaskedRatioLossConfig
    | ClippedLossConfig
    | PpoLossConfig
    | GrpoLossConfig
    | DrGrpoLossConfig
    | DapoLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | TokenTruncatedLossConfig
    | SequenceTruncatedLossConfig
    | IcePopLossConfig
    | DistillationLossConfig
    | ImportedLossConfig,
    Field(discriminator="type"),
]
