"""Scores on their way from environment code to the runner: checked, and as plain values."""

from __future__ import annotations

import math
from typing import Any

from slipstream.environments.base import MAX_REWARD, Score

MAX_DETAIL_CHARACTERS = 4096


def score_as_json(score: Score, text: str) -> dict[str, Any]:
    """`text`: what was judged. Raises `ValueError` for a reward that cannot be trained on."""
    return {
        "reward": _finite(score.reward),
        "correct": bool(score.correct),
        "text": text,
        "detail": str(score.detail)[:MAX_DETAIL_CHARACTERS],
    }


def _finite(reward: Any) -> float:
    """A plain number, whatever number type the environment computes with."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"a reward must be finite, not {value}")
    if abs(value) > MAX_REWARD:
        raise ValueError(f"a reward must be within {MAX_REWARD:g} of 0, not {value}")
    return value
