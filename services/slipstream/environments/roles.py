"""Roles of an environment: the players, or agents, that the model plays in one episode, each with a reward of its own.

    class Duel:
        roles = ("first", "second")

An episode answers with `Turn("second", [...])` where the next turn is that role's; its `score` returns `RoleScores`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import suggest
from slipstream.environments.base import AnyEnvironment, takes_turns

MAX_ROLES = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def roles_of(environment: object) -> tuple[str, ...]:
    """The names that an environment declares; none where it has no roles. Raises `ConfigError`."""
    found = getattr(environment, "roles", ())
    where = f"environments.{getattr(environment, 'name', '')}"
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise ConfigError(f"{where}: its roles are no sequence of names")
    names = tuple(found)
    if len(names) > MAX_ROLES:
        raise ConfigError(f"{where}: it has {len(names)} roles, of which {MAX_ROLES} are taken")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: {name!r} is no name of a role: up to 64 letters, digits, or any of _.-")
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: two of its roles have one name")
    return names


def check_trained_roles(environment: AnyEnvironment, trained: Sequence[str]) -> None:
    """Raise `ConfigError` unless an environment's section names roles that it has."""
    roles = roles_of(environment) if takes_turns(environment) else ()
    for name in trained:
        if name not in roles:
            near = suggest(difflib.get_close_matches(name, roles, n=1))
            known = ", ".join(roles) or "none"
            raise ConfigError(
                f"environments.{environment.name}: trained_roles: it has no role {name!r}{near}; its roles: {known}"
            )
