"""Advantages from configuration, a user's by import path."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.algorithms.advantages import Members
from slipstream.common.config import ConfigError
from slipstream.orchestrator.advantage import BadAdvantages, build_advantages
from slipstream.orchestrator.advantage_config import (
    AdvantageConfig,
    GroupMeanConfig,
    GroupNormalizedConfig,
    ImportedAdvantageConfig,
    LeaveOneOutConfig,
    LengthPenalizedConfig,
    MaxRlConfig,
)

MEMBERS = Members([1.0, 0.0, 0.0, 1.0], [10, 30, 20, 20])


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GroupNormalizedConfig(epsilon=0.5), [0.5, -0.5, -0.5, 0.5]),
        (GroupMeanConfig(), [0.5, -0.5, -0.5, 0.5]),
        (LeaveOneOutConfig(), [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        (MaxRlConfig(), [1.0, -1.0, -1.0, 1.0]),
        # 1 + 0.4 / 2, 0 - 0.4 / 2, 0, 1: their mean is 0.5
        (LengthPenalizedConfig(weight=0.4), [0.7, -0.7, -0.5, 0.5]),
        (ImportedAdvantageConfig(path="own_advantages:tokens_saved", options={"scale": 0.1}), [2.0, 0.0, 1.0, 1.0]),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_each_kind_of_advantage_is_what_its_configuration_says(config: AdvantageConfig, expected: list[float]) -> None:
    assert build_advantages(config)(MEMBERS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no attribute 'missing'"),
        ("NOT_A_FUNCTION", "is not callable"),
        ("one_too_few", "returned [0.0, 0.0, 0.0] for 4 members"),
        ("infinite", "returned [inf, inf, inf, inf] for 4 members"),
    ],
)
def test_a_users_function_that_cannot_be_used_is_refused_at_the_start(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^orchestrator\.advantage\.path: ") as caught:
        build_advantages(ImportedAdvantageConfig(path=f"own_advantages:{name}"))
    assert words in str(caught.value)


def test_an_option_that_it_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fails with TypeError: .*'scael'"):
        build_advantages(ImportedAdvantageConfig(path="own_advantages:tokens_saved", options={"scael": 1}))


def test_what_a_users_function_raises_later_costs_the_group_alone() -> None:
    advantages = build_advantages(ImportedAdvantageConfig(path="own_advantages:picky"))
    with pytest.raises(BadAdvantages, match="own_advantages:picky fails with IndexError"):
        advantages(Members([0.0, 1.0], [1, 1]))
