"""What every environment's section has, whatever its type. Imports no torch and no environment code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig
from slipstream.environments.limits import Limits


class CurriculumConfig(BaseConfig):
    """Tasks chosen by how often they are answered right."""

    enabled: bool = False
    """Draw tasks in proportion to p (1 - p), with p the part of the latest rollouts that were right, in place of
    evenly: those that are always right, or never, teach nothing."""

    parts: int | None = Field(default=None, ge=1)
    """Parts of the training set with a rate each: a task is of the part of its number modulo this. Unset takes the
    environment's levels where it has some, else each task by itself."""

    floor: float = Field(default=0.1, ge=0.01, le=1)
    """Least chance of a part, relative to one that is right half of the time: what was too hard, or easy, is asked
    again now and then."""

    memory_groups: int = Field(default=8, ge=2)
    """Groups that a rate is a mean of, the latest counting most."""


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

    curriculum: CurriculumConfig = CurriculumConfig()

    deadline_s: float = Field(default=120.0, gt=0)
    """A group that takes longer fails."""

    spare_samples: int = Field(default=0, ge=0, le=256)
    """Rollouts of a training group beyond `samples_per_group`: those that end first are taken, the others given up.
    What is trained is then shorter than what the model says."""


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

    workers: int = Field(default=1, ge=1, le=64)
    """Processes that run its code, in each runner. What ends one of them costs what that one was at."""

    memory_limit_bytes: int = Field(default=4 * 2**30, ge=0, le=2**50)
    """Resident memory of one of these processes, with what it started: one that holds more is ended and replaced. Their
    allocations are refused far beyond. 0: no limit."""

    max_turns: int | None = Field(default=None, ge=1)
    """Messages of the model in a rollout of an environment that takes turns, at most. Unset takes the environment's
    own, as do `max_rollout_tokens` and the two timeouts."""

    max_rollout_tokens: int | None = Field(default=None, ge=0)
    """Tokens that the model may draw in all turns of a rollout. 0 leaves it to `max_new_tokens` and the context."""

    rollout_timeout_s: float | None = Field(default=None, ge=0)
    """A rollout that takes longer ends without a reward, in seconds, while the others of its group go on. 0 leaves it
    to `deadline_s`."""

    trained_roles: list[str] = Field(default_factory=list)
    """Of an environment with several roles, those whose turns train; the model plays the others, too, and learns
    nothing from that. Empty: all of them."""

    step_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time of one call of an episode's code, in seconds, up to 0.8 of the runner's `environment_timeout_s`."""

    def limits(self, own: Limits) -> Limits:
        """An environment's own limits, but for what this section says."""
        said = {
            "max_turns": self.max_turns,
            "max_tokens": self.max_rollout_tokens,
            "timeout_s": self.rollout_timeout_s,
            "step_timeout_s": self.step_timeout_s,
        }
        return replace(own, **{name: value for name, value in said.items() if value is not None})

    def sequenced(self) -> dict[str, Any]:
        """The orchestrator's part of it."""
        return {name: getattr(self, name) for name in SequencedConfig.model_fields}
