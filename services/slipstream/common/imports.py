"""Code that a configuration names as `package.module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from slipstream.common.config import ConfigError

PATH_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""What such a path looks like."""
SEARCHED = "; looked for on PYTHONPATH, among the installed packages, and in the folder where the run is started"


def import_callable(path: str, where: str) -> Callable[..., Any]:
    """Import what `path` names. Raises `ConfigError` that begins with `where`, the field or section of the path."""
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        raise ConfigError(f"{where}: cannot import {path!r}: {error}{SEARCHED if missing else ''}") from error
    if not callable(found):
        raise ConfigError(f"{where}: {path!r} is not callable")
    return found
