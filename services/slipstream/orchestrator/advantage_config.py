"""Configuration of advantages: `[orchestrator.advantage]`, chosen by `type`. Formulas: docs/algorithms.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig
from slipstream.common.imports import PATH_PATTERN


class GroupNormalizedConfig(BaseConfig):
    """Reward less the group's mean, over its standard deviation."""

    type: Literal["group_normalized"] = "group_normalized"

    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation that advantages are divided by."""


class GroupMeanConfig(BaseConfig):
    """Reward less the group's mean."""

    type: Literal["group_mean"] = "group_mean"


class LeaveOneOutConfig(BaseConfig):
    """Reward less the mean of the group's other members."""

    type: Literal["leave_one_out"] = "leave_one_out"


class MaxRlConfig(BaseConfig):
    """Reward less the group's mean, over that mean: rare successes weigh more. For rewards from 0 to 1."""

    type: Literal["max_rl"] = "max_rl"


class LengthPenalizedConfig(BaseConfig):
    """Reward with a bonus for short right answers and a malus for long ones, less the group's mean."""

    type: Literal["length_penalized"] = "length_penalized"

    weight: float = Field(default=0.5, ge=0)
    """Weight of the length's part, which is 0.5 for the shortest of the group and -0.5 for the longest."""

    right_from: float = 1.0
    """A rollout of at least this reward is right; the others gain nothing by being short."""


class ImportedAdvantageConfig(BaseConfig):
    """Advantages of your own, found by import path."""

    type: Literal["import"] = "import"

    path: str = Field(pattern=PATH_PATTERN)
    """`package.module:function`; called with (members, **options) in the orchestrator, it returns one finite number for
    each member. Keep it quick: nothing else happens meanwhile."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""


AdvantageConfig = Annotated[
    GroupNormalizedConfig
    | GroupMeanConfig
    | LeaveOneOutConfig
    | MaxRlConfig
    | LengthPenalizedConfig
    | ImportedAdvantageConfig,
    Field(discriminator="type"),
]
