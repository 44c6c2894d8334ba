"""Advantages of the members of one group from their rewards. Pure Python: the sealer calls it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_normalized(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """`(R - mean) / (std + eps)` with the population standard deviation (GRPO, arXiv:2402.03300, with eps).

    A group whose rewards are all equal gets zeros: it teaches nothing.
    """
    if not rewards or min(rewards) == max(rewards):  # rounding in the mean would leave tiny advantages
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + eps) for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Reward less the mean of the *other* members (RLOO, arXiv:2402.14740): unbiased, and keeps the reward's scale.

    A single member has nothing to be compared with and gets 0.
    """
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    total = math.fsum(rewards)
    return [reward - (total - reward) / (count - 1) for reward in rewards]
