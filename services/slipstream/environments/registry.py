"""From configuration to environments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from slipstream.common.config import ConfigError
from slipstream.environments.base import Environment
from slipstream.environments.config import EnvironmentConfig, ExpressionConfig, ImportedConfig, SpellBackwardConfig
from slipstream.environments.expression import Expression
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
        case ImportedConfig():
            return _import(config, seed)


def _import(config: ImportedConfig, seed: int) -> Environment:
    module_name, _, factory_name = config.path.partition(":")
    try:
        module = importlib.import_module(module_name)
        factory: Callable[[ImportedConfig, int], Environment] = getattr(module, factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environments.{config.name}: cannot import {config.path!r}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"environments.{config.name}: {config.path!r} is not callable")
    return factory(config, seed)
