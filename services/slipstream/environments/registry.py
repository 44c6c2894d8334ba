"""From configuration to environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.common.config import ConfigError
from slipstream.common.imports import import_callable
from slipstream.environments.base import Environment
from slipstream.environments.config import (
    EnvironmentConfig,
    ExpressionConfig,
    ImportedConfig,
    ReasoningGymConfig,
    SpellBackwardConfig,
)
from slipstream.environments.expression import Expression
from slipstream.environments.reasoning_gym import ReasoningGym
from slipstream.environments.spell_backward import SpellBackward


def build_environments(configs: Sequence[EnvironmentConfig], seed: int) -> dict[str, Environment]:
    """Every configured environment by name. `seed` is the run's. Raises `ConfigError`."""
    environments: dict[str, Environment] = {}
    for config in configs:
        if config.name in environments:
            raise ConfigError(f"environments: two are called {config.name!r}")
        environments[config.name] = _build(config, seed if config.seed is None else config.seed)
    return environments


def _build(config: EnvironmentConfig, seed: int) -> Environment:
    match config:
        case SpellBackwardConfig():
            return SpellBackward(config, seed)
        case ExpressionConfig():
            return Expression(config, seed)
        case ReasoningGymConfig():
            return ReasoningGym(config, seed)
        case ImportedConfig():
            return _import(config, seed)


def _import(config: ImportedConfig, seed: int) -> Environment:
    factory: Callable[[ImportedConfig, int], Environment] = import_callable(config.path, f"environments.{config.name}")
    return factory(config, seed)
