"""Advantages of the members of one group. Pure Python: the sealer calls it. All return one number for each member."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Members:
    """What is known of a group's rollouts, in the same order in each list."""

    rewards: Sequence[float]
    """Finite."""

    token_counts: Sequence[int]
    """Loss tokens of each: what it sampled."""


Advantages = Callable[[Members], Sequence[float]]
"""Advantages with their options bound: this module's, or anybody's. Pure, and quick: the orchestrator waits for it."""


def group_normalized(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """`(R - mean) / (std + eps)` with the population standard deviation (GRPO, arXiv:2402.03300, with eps).

    A group whose rewards are all equal gets zeros: it teaches nothing.
    """
    if not rewards or min(rewards) == max(rewards):  # rounding in the mean would leave tiny advantages
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + eps) for reward in rewards]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """`R - mean` (Dr. GRPO, arXiv:2503.20783, section 3.2): easy and hard tasks keep their weight.

    A group whose rewards are all equal gets zeros.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Reward less the mean of the *other* members (RLOO, arXiv:2402.14740): unbiased, and keeps the reward's scale.

    A single member has nothing to be compared with and gets 0, as do members with equal rewards.
    """
    count = len(rewards)
    if count < 2 or min(rewards) == max(rewards):
        return [0.0] * count
    total = math.fsum(rewards)
    return [reward - (total - reward) / (count - 1) for reward in rewards]


def max_rl(rewards: Sequence[float]) -> list[float]:
    """`(R - mean) / mean` (MaxRL, arXiv:2602.02710): the gradient of the log of the chance to succeed.

    For rewards from 0 to 1. Rare successes weigh more: as the inverse of how often they happen. A group whose mean is
    not above 0 gets zeros.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]


def length_penalized(
    rewards: Sequence[float], token_counts: Sequence[int], *, weight: float = 0.5, right_from: float = 1.0
) -> list[float]:
    """`group_mean` of rewards with Kimi k1.5's length reward added (arXiv:2501.12599, section 2.3.3).

        l = 0.5 - (tokens - fewest) / (most - fewest),  within the group; 0 where all have the same number
        R' = R + weight * (l if R >= right_from else min(0, l))

    Short right answers gain, long ones lose; a wrong one gains nothing by being short.
    """
    if not rewards:
        return []
    fewest, most = min(token_counts), max(token_counts)

    def length_reward(reward: float, count: int) -> float:
        share = 0.5 - (count - fewest) / (most - fewest) if most > fewest else 0.0
        return share if reward >= right_from else min(0.0, share)

    pairs = zip(rewards, token_counts, strict=True)
    return group_mean([reward + weight * length_reward(reward, count) for reward, count in pairs])
