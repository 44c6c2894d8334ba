"""Advantages where each rollout of a group has several roles, each with a reward of its own. Pure Python.

What one role of a game earns says nothing of another: a seat may be the better one, and what one player wins the other
loses. So the baseline is a role's own, as in SPIRAL's role-conditioned advantage estimation (arXiv:2506.24119), whose
baseline is a running mean by game and role; here it is that of the role's rewards within the group, by any of the
functions of `advantages.py`, since all rollouts of a group play the same task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.algorithms.advantages import Advantages, Members


@dataclass(frozen=True, slots=True)
class RoleResult:
    """What one role came to in one rollout."""

    reward: float
    """Finite."""

    token_count: int
    """Loss tokens that were sampled as this role."""


def by_role(
    advantages: Advantages, rollouts: Sequence[Mapping[str, RoleResult]], min_std: float
) -> list[dict[str, float]] | None:
    """The advantage of each role of each rollout; None where the rewards of no role spread by `min_std` or more.

    A role whose rewards spread less gets zeros beside others. Roles may be missing in some rollouts.
    """
    found: list[dict[str, float]] = [dict.fromkeys(rollout, 0.0) for rollout in rollouts]
    spread = False
    for role in dict.fromkeys(role for rollout in rollouts for role in rollout):
        playing = [index for index, rollout in enumerate(rollouts) if role in rollout]
        results = [rollouts[index][role] for index in playing]
        rewards = [result.reward for result in results]
        if variance(rewards) < min_std**2:
            continue
        spread = True
        members = Members(rewards, [result.token_count for result in results])
        for index, advantage in zip(playing, advantages(members), strict=True):
            found[index][role] = advantage
    return found if spread else None


def variance(rewards: Sequence[float]) -> float:
    """Of a group's rewards, as a population."""
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
