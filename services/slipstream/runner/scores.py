"""Scores on their way from environment code to the runner: checked, and as plain values."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from slipstream.environments.base import MAX_REWARD, EpisodeEnvironment, RoleScores, Score
from slipstream.environments.roles import roles_of

MAX_DETAIL_CHARACTERS = 4096


def score_as_json(score: Score, text: str) -> dict[str, Any]:
    """`text`: what was judged. Raises `ValueError` for a reward that cannot be trained on."""
    return {
        "reward": _finite(score.reward),
        "correct": bool(score.correct),
        "text": text,
        "detail": str(score.detail)[:MAX_DETAIL_CHARACTERS],
    }


def episode_score_as_json(
    score: object, text: str, environment: EpisodeEnvironment, *, spoken: Sequence[str], trained: Collection[str]
) -> dict[str, Any]:
    """The same of an episode; `spoken`: roles that had a turn, `trained`: those that train, where that is not all.

    Raises `TypeError` for what is no score of this environment, and `ValueError` for one that lacks a role.
    """
    roles = roles_of(environment)
    wanted = RoleScores if roles else Score
    if not isinstance(score, wanted):
        raise TypeError(f"score of {environment.name!r} must return a {wanted.__name__}, got {type(score).__name__}")
    if isinstance(score, Score):
        return score_as_json(score, text)
    strange = [role for role in score.scores if role not in roles]
    missing = [role for role in spoken if role not in score.scores]
    if strange or missing:
        what = f"it has no role {strange[0]!r}" if strange else f"it has none for {missing[0]!r}, which took a turn"
        raise ValueError(f"score of {environment.name!r}: {what}")
    found = [
        {
            "role": role,
            "reward": _finite(score.scores[role].reward),
            "correct": bool(score.scores[role].correct),
            "untrained": bool(trained) and role not in trained,
        }
        for role in spoken
    ]
    counted = [each for each in found if not each["untrained"]] or found
    right = all(each["correct"] for each in counted) and bool(counted)
    details = [f"{role}: {score.scores[role].detail}" for role in spoken if score.scores[role].detail]
    return {
        "reward": math.fsum(each["reward"] / len(counted) for each in counted),
        "correct": right if score.correct is None else bool(score.correct),
        "text": text,
        "detail": "; ".join(filter(None, [str(score.detail), *details]))[:MAX_DETAIL_CHARACTERS],
        "roles": found,
    }


def _finite(reward: Any) -> float:
    """A plain number, whatever number type the environment computes with."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"a reward must be finite, not {value}")
    if abs(value) > MAX_REWARD:
        raise ValueError(f"a reward must be within {MAX_REWARD:g} of 0, not {value}")
    return value
