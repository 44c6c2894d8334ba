"""What a teacher's `config.json` says of it; the teacher is another model than the run's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slipstream.common.config import ConfigError
from slipstream.models.base import Sizes
from slipstream.models.registry import BUILT_IN, CONFIG_FILE, read_config, sizes_of


@dataclass(frozen=True)
class Bounds:
    """What a sequence may be."""

    vocab_size: int
    max_context_tokens: int


def sizes_of_teacher(model_dir: Path, architecture: str) -> Sizes:
    """Of what we compute ourselves. It names no code: the architecture is a built-in one, or that of the run."""
    given = read_config(model_dir)
    kind = given.get("model_type", "")
    return sizes_of(kind if isinstance(kind, str) and kind in BUILT_IN else architecture, given)


def bounds_on_vllm(model_dir: Path) -> Bounds:
    """Of any model: vLLM has code for many that we have none for. Raises `ConfigError`."""
    given = read_config(model_dir)
    text = given.get("text_config")
    found = {**given, **cast("dict[str, Any]", text)} if isinstance(text, dict) else given
    values = [found.get(name) for name in ("vocab_size", "max_position_embeddings")]
    for name, value in zip(("vocab_size", "max_position_embeddings"), values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            raise ConfigError(f"{model_dir / CONFIG_FILE} has no {name!r} that is a number above 1")
    return Bounds(*cast("list[int]", values))
