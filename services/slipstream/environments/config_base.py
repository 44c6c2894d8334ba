"""What every environment's section has, whatever its type. Imports no torch and no environment code."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig


class SequencedConfig(BaseConfig):
    """What the orchestrator is told of an environment: all but what the environment's own code is."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Its name in the run: in records, metrics and reports. Empty takes the type's."""

    weight: float = Field(default=1.0, gt=0)
    """Its part of the training mixture, relative to the others."""

    age_out: Literal["regenerate", "hold", "mask"] = "regenerate"
    """What happens to groups that grow too old to be trained: start again once, make the step wait for them, or
    train only their tokens within the bound."""

    train_task_count: int = Field(default=1_000_000, ge=1)
    """Tasks of the training set; training draws from it with replacement."""

    evaluation_task_count: int = Field(default=200, ge=0)
    """Held-out tasks asked before and after training. 0 leaves it out."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature of training rollouts. Held-out tasks are answered greedily."""

    max_new_tokens: int = Field(default=10, ge=1)
    """Tokens a rollout may draw per turn, the end token included."""

    deadline_s: float = Field(default=120.0, gt=0)
    """A group that takes longer fails."""


class BaseEnvironmentConfig(SequencedConfig):
    """What every environment has."""

    seed: int | None = Field(default=None, ge=0)
    """Seed of its tasks and of the split into training and held-out ones. Unset takes the run's."""

    demonstration_weight: float = Field(default=1.0, ge=0)
    """Its part of the demonstrations of the supervised warm-up, relative to the others."""

    chat: bool = False
    """Show each prompt as a user's message, by the chat template of `trainer.initial_model`."""

    system: str = ""
    """With `chat`: a system message before it. Empty leaves it to the template."""

    def sequenced(self) -> dict[str, Any]:
        """The orchestrator's part of it."""
        return {name: getattr(self, name) for name in SequencedConfig.model_fields}
