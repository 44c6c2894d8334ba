"""What the answers to held-out problems say: accuracy, reward, pass@k, and how sure that is. No I/O, no clocks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CONFIDENCE_Z = 1.959964
"""Of 95 %."""
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer."""

    correct: bool
    reward: float
    token_count: int
    """Sampled ones."""
    truncated: bool
    """Cut off at the length limit."""
    roles: Mapping[str, tuple[float, bool]] = field(default_factory=dict[str, tuple[float, bool]])
    """Reward of each role, and whether it is right, where the environment has roles."""


@dataclass(frozen=True, slots=True)
class RoleFigures:
    """How one role did, over the answers in which it had a turn."""

    reward_mean: float
    accuracy: float
    answer_count: int


def pass_at_k(sample_count: int, correct_count: int, k: int) -> float:
    """Chance that at least one of `k` samples is right, from `sample_count` of which `correct_count` are.

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code": the part of all
    subsets of `k` samples that hold a right one, 1 - C(n-c, k) / C(n, k), as a product that does not overflow.
    """
    if not 1 <= k <= sample_count:
        raise ValueError(f"k is {k}, and there are {sample_count} samples")
    if sample_count - correct_count < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(sample_count - correct_count + 1, sample_count + 1))


def shown_ks(sample_count: int) -> list[int]:
    """The k that are told: powers of two, and all samples."""
    return sorted({*(1 << bit for bit in range(sample_count.bit_length())), sample_count} - {0})


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Wilson's score interval, 95 %, of a mean of `count` values within [0, 1].

    Exact in no case and sensible in all, 0 and 1 among them. Values between 0 and 1 spread less than a coin of the same
    mean, so it is cautious for them.
    """
    if not count:
        return 0.0, 1.0
    square = CONFIDENCE_Z**2
    middle = (mean + square / (2 * count)) / (1 + square / count)
    spread = mean * (1 - mean) / count + square / (4 * count**2)
    half = CONFIDENCE_Z / (1 + square / count) * math.sqrt(max(spread, 0.0))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile bootstrap, 95 %, of a mean: for figures of any range. The same values and seed give the same ends."""
    if not values:
        return math.nan, math.nan
    draw = random.Random(seed)
    means = sorted(math.fsum(draw.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    cut = int(0.025 * resamples)
    return means[cut], means[-1 - cut]


@dataclass(frozen=True)
class Summary:
    """An evaluation of one environment. Intervals are of 95 % and over problems: samples of a problem are alike, and
    count as one observation."""

    problem_count: int
    samples_per_problem: int
    """Of the problem with the fewest."""
    accuracy: float
    """Mean over problems of the part of their samples that is right."""
    accuracy_interval: tuple[float, float]
    """Wilson's."""
    reward_mean: float
    pass_at: dict[int, float]
    """By k, the mean over problems."""
    tokens_mean: float
    truncated_fraction: float
    roles: Mapping[str, RoleFigures] = field(default_factory=dict[str, RoleFigures])
    """By role."""


def summarize(problems: Sequence[Sequence[Answer]]) -> Summary:
    """The figures of problems with one answer or more each. Raises `ValueError` for none."""
    if not problems or not all(problems):
        raise ValueError("no answers")
    shares = [sum(answer.correct for answer in answers) / len(answers) for answers in problems]
    accuracy = math.fsum(shares) / len(shares)
    fewest = min(map(len, problems))
    every = [answer for answers in problems for answer in answers]
    return Summary(
        problem_count=len(problems),
        samples_per_problem=fewest,
        accuracy=accuracy,
        accuracy_interval=wilson(accuracy, len(problems)),
        reward_mean=math.fsum(reward_means(problems)) / len(problems),
        pass_at={
            k: math.fsum(pass_at_k(len(each), sum(a.correct for a in each), k) for each in problems) / len(problems)
            for k in shown_ks(fewest)
        },
        tokens_mean=sum(answer.token_count for answer in every) / len(every),
        truncated_fraction=sum(answer.truncated for answer in every) / len(every),
        roles=_role_figures(every),
    )


def _role_figures(answers: Sequence[Answer]) -> dict[str, RoleFigures]:
    found: dict[str, list[tuple[float, bool]]] = {}
    for answer in answers:
        for role, result in answer.roles.items():
            found.setdefault(role, []).append(result)
    return {
        role: RoleFigures(
            reward_mean=math.fsum(reward for reward, _ in results) / len(results),
            accuracy=sum(right for _, right in results) / len(results),
            answer_count=len(results),
        )
        for role, results in sorted(found.items())
    }


def reward_means(problems: Sequence[Sequence[Answer]]) -> list[float]:
    """The mean reward of each problem: what the bootstrap draws from."""
    return [math.fsum(answer.reward for answer in answers) / len(answers) for answers in problems]
