"""From configuration to environments.

The product's own go by their `type`. A third party's is named by import path, or by the name that an installed package
registers it under:

    [project.entry-points."slipstream.environments"]
    vowels = "vowels:Vowels"
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import suggest
from slipstream.common.imports import import_callable
from slipstream.environments.base import AnyEnvironment
from slipstream.environments.config import EntryPointConfig, EnvironmentConfig, ImportedConfig
from slipstream.environments.roles import check_trained_roles

ENTRY_POINTS = "slipstream.environments"
"""The group that packages register environments in."""

OWN = {
    "spell_backward": "slipstream.environments.spell_backward:SpellBackward",
    "expression": "slipstream.environments.expression:Expression",
    "reasoning_gym": "slipstream.environments.reasoning_gym:ReasoningGym",
    "maths": "slipstream.environments.maths:Maths",
    "python_code": "slipstream.environments.python_code:PythonCode",
    "terminal": "slipstream.environments.terminal:Terminal",
    "verifiers": "slipstream.environments.verifiers:Verifiers",
    "textarena": "slipstream.environments.textarena:TextArena",
    "openenv": "slipstream.environments.openenv:OpenEnv",
}
"""Our own by `type`. Imported when they are built: each brings libraries of its own."""

EXTRAS = ("verifiers", "textarena", "openenv")
"""Types whose library is an extra: all three have one name."""

SUPPORTED = {"verifiers": ("0.1.14", "0.4", "later ones have no environments of a dataset and a rubric")}
"""Of an extra's library the least version, the first that is too new, and why."""

Factory = Callable[[EnvironmentConfig, int], AnyEnvironment]


def build_environments(configs: Sequence[EnvironmentConfig], seed: int) -> dict[str, AnyEnvironment]:
    """Every configured environment by name. `seed` is the run's. Raises `ConfigError`."""
    environments: dict[str, AnyEnvironment] = {}
    for config in configs:
        if config.name in environments:
            raise ConfigError(f"environments: two are called {config.name!r}")
        environment = factory_of(config)(config, seed if config.seed is None else config.seed)
        check_trained_roles(environment, config.trained_roles)
        environments[config.name] = environment
    return environments


def factory_of(config: EnvironmentConfig) -> Factory:
    """What makes an environment. Raises `ConfigError`."""
    where = f"environments.{config.name}"
    if isinstance(config, EntryPointConfig):
        return _registered(config.entry_point, where)
    if config.type in EXTRAS and find_spec(config.type) is None:
        raise ConfigError(f"{where}: {config.type} is not installed: pip install 'slipstream[{config.type}]'")
    if config.type in SUPPORTED:
        _check_version(config.type, where)
    return import_callable(config.path if isinstance(config, ImportedConfig) else OWN[config.type], where)


def _check_version(library: str, where: str) -> None:
    least, beyond, why = SUPPORTED[library]
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:  # a source tree, of which nobody knows
        return
    if not _release(least) <= _release(version) < _release(beyond):
        raise ConfigError(
            f"{where}: {library} {version} is installed, and it takes {least} or later, below {beyond} ({why}): "
            f"pip install 'slipstream[{library}]'"
        )


def _release(version: str) -> tuple[int, ...]:
    """Its numbers, without what marks a release before or after: 0.4.0rc1 counts as 0.4.0."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def registered() -> dict[str, metadata.EntryPoint]:
    """Environments of installed packages, by name; the first of two of a name."""
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, point)
    return found


def _registered(name: str, where: str) -> Factory:
    points = registered()
    if name not in points:
        near = suggest(difflib.get_close_matches(name, points, n=1))
        if name in OWN:
            near = f'; it is built in: type = "{name}"'
        known = ", ".join(sorted(points)) or "none"
        raise ConfigError(f"{where}: no installed package registers an environment {name!r}{near}; registered: {known}")
    return import_callable(points[name].value, where)
