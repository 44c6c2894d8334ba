"""Advantages of a user's, good and bad."""

from __future__ import annotations

from slipstream.algorithms.advantages import Members

NOT_A_FUNCTION = 5


def tokens_saved(members: Members, *, scale: float = 1.0) -> list[float]:
    return [scale * (max(members.token_counts) - count) for count in members.token_counts]


def one_too_few(members: Members) -> list[float]:
    return [0.0] * (len(members.rewards) - 1)


def infinite(members: Members) -> list[float]:
    return [float("inf")] * len(members.rewards)


def picky(members: Members) -> list[float]:
    """Works where it is tried, and not on groups of two."""
    return [0.0, 1.0, 2.0, 3.0] if len(members.rewards) == 4 else [members.rewards[9]]
