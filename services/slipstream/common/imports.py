"""Code that a configuration names as `package.module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from slipstream.common.config import ConfigError

PATH_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""What such a path looks like."""


def import_callable(path: str, where: str) -> Callable[..., Any]:
    """Import what `path` names. Raises `ConfigError` that begins with `where`, the field or section of the path."""
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {path!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{where}: {path!r} is not callable")
    return found
