"""From `[orchestrator.advantage]` to the function that judges a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from slipstream.algorithms.advantages import (
    Advantages,
    Members,
    group_mean,
    group_normalized,
    leave_one_out,
    length_penalized,
    max_rl,
)
from slipstream.common.config import ConfigError
from slipstream.common.imports import import_callable
from slipstream.orchestrator.advantage_config import (
    AdvantageConfig,
    GroupMeanConfig,
    GroupNormalizedConfig,
    ImportedAdvantageConfig,
    LeaveOneOutConfig,
    LengthPenalizedConfig,
    MaxRlConfig,
)

WHERE = "orchestrator.advantage.path"

log = structlog.get_logger()


class BadAdvantages(ValueError):
    """A user's function raised, or returned something other than a finite number for each member."""


def build_advantages(config: AdvantageConfig) -> Advantages:
    """The function, its options bound. Raises `ConfigError` for one of the user's that cannot be used."""
    match config:
        case GroupNormalizedConfig():
            return lambda members: group_normalized(members.rewards, config.epsilon)
        case GroupMeanConfig():
            return lambda members: group_mean(members.rewards)
        case LeaveOneOutConfig():
            return lambda members: leave_one_out(members.rewards)
        case MaxRlConfig():
            return lambda members: max_rl(members.rewards)
        case LengthPenalizedConfig():
            return lambda members: length_penalized(
                members.rewards, members.token_counts, weight=config.weight, right_from=config.right_from
            )
        case ImportedAdvantageConfig():
            advantages = _checked(import_callable(config.path, WHERE), config)
            try:
                advantages(Members([0.0, 1.0, 0.5, 1.0], [3, 5, 4, 8]))
            except BadAdvantages as error:
                raise ConfigError(f"{WHERE}: {error}") from error
            return advantages


def _checked(function: Callable[..., Any], config: ImportedAdvantageConfig) -> Advantages:
    """The user's function; whatever it does wrong costs the group, not the run."""

    def advantages(members: Members) -> Sequence[float]:
        try:
            found = [float(each) for each in function(members, **config.options)]
        except Exception as error:  # user code
            log.warning("advantages_failed", path=config.path, exc_info=True)
            raise BadAdvantages(f"{config.path} fails with {type(error).__name__}: {error}") from error
        if len(found) != len(members.rewards) or not all(map(math.isfinite, found)):
            raise BadAdvantages(f"{config.path} returned {found} for {len(members.rewards)} members")
        return found

    return advantages
