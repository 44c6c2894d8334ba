"""Finds architectures by name or import path, and the sizes of a model directory. Imports no torch.

Only a run's own configuration names code: the key is written into `<run_dir>/model/config.json`, and is not read from
the `config.json` of a model that came from elsewhere.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from slipstream.common.config import ConfigError
from slipstream.common.disk import make_directory, replace_file
from slipstream.models.base import Architecture, Sizes

BUILT_IN = {name: f"slipstream.models.{name}" for name in ("deepseek_v3", "llama", "qwen3", "qwen3_moe")}
"""Named as the `model_type` of their `config.json`."""
CONFIG_FILE = "config.json"
ARCHITECTURE_KEY = "slipstream_architecture"
FUNCTIONS = ("read_sizes", "build_model", "init_weights")


def find_architecture(name: str) -> Architecture:
    """The architecture of a built-in name, or the module at an import path."""
    path = BUILT_IN.get(name, name)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not path.startswith(error.name or path):  # something that the module imports is missing
            raise
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"model.architecture: no module {name!r} on the path; built in: {known}") from None
    missing = [function for function in FUNCTIONS if not hasattr(module, function)]
    if missing:
        raise ConfigError(f"model.architecture: {name} lacks {', '.join(missing)}; see slipstream/models/base.py")
    return cast("Architecture", module)


def sizes_of(architecture: str, config: dict[str, Any]) -> Sizes:
    """The sizes that `architecture` reads from a `config.json`, whatever that names."""
    found = find_architecture(architecture)
    try:
        return found.read_sizes({**config, ARCHITECTURE_KEY: architecture})
    except KeyError as error:
        raise ConfigError(f"{CONFIG_FILE} has no {error.args[0]!r}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{CONFIG_FILE}: {where}: {problem['msg'].removeprefix('Value error, ')}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{CONFIG_FILE} cannot be used: {error}") from None


def read_config(model_dir: Path) -> dict[str, Any]:
    """`<model_dir>/config.json` as it stands. Raises `ConfigError` unless it is a JSON object."""
    file = model_dir / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is damaged: it holds no JSON object")
    return config


def load_sizes(model_dir: Path) -> Sizes:
    """The sizes of a run's own model directory, which names its architecture."""
    config = read_config(model_dir)
    return sizes_of(config.get(ARCHITECTURE_KEY, config.get("model_type", "")), config)


def save_sizes(sizes: Sizes, model_dir: Path) -> None:
    """Write `<model_dir>/config.json`."""
    make_directory(model_dir)
    config = {**sizes.to_hf(), ARCHITECTURE_KEY: sizes.architecture}
    replace_file(model_dir / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")
