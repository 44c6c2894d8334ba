"""Bounds of a rollout that takes turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cut = Literal["turn", "context", "turns", "tokens"]
"""What ended a rollout, where its environment did not: a turn that was cut off, no room for another one, `max_turns` or
`max_tokens`."""


@dataclass(frozen=True)
class Limits:
    """What one rollout of an episode may take. A section `[[environments]]` may say otherwise."""

    max_turns: int = 16
    """Messages of the model."""

    max_tokens: int = 0
    """Tokens that the model may draw in all its turns. 0 leaves it to `max_new_tokens` a turn and the context."""

    ends_when_cut: bool = True
    """A turn that was cut off at `max_new_tokens` is the last. Otherwise the next prompt ends it with the end token."""

    timeout_s: float = 0.0
    """Longest time of a rollout, the model's included. 0 leaves it to `deadline_s` of the group."""

    step_timeout_s: float = 30.0
    """Longest time of one call of the episode's code: setup, a step, or the score."""
