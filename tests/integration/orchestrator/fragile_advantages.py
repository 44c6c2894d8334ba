"""Advantages that fail on groups of equal rewards."""

from __future__ import annotations

from slipstream.algorithms.advantages import Members


def fragile(members: Members) -> list[float]:
    mean = sum(members.rewards) / len(members.rewards)
    return [reward / (max(members.rewards) - mean) for reward in members.rewards]
