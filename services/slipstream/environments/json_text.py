"""JSON that others wrote, a model or a client, and that is to be shown and encoded again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Of lists and objects in one another: templates and encoders go down by themselves."""


def read_json(text: str) -> Any:
    """The value. Raises `ValueError` where it is none that JSON and a tokenizer take."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Raises `ValueError`: a number that is not finite, half of a character, or nested too deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = (each.values() if isinstance(each, Mapping) else each for each in level if _holds(each))
        level = [inner for each in inside for inner in each]
    if level:
        raise ValueError(f"it is nested too deep: more than {MAX_DEPTH} lists and objects within one another")
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # what fails is a ValueError


def _holds(value: Any) -> bool:
    return isinstance(value, Mapping | list)
