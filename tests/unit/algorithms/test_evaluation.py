from __future__ import annotations

import itertools
import math
import random

import pytest

from slipstream.algorithms.evaluation import Answer, RoleFigures, bootstrap, pass_at_k, shown_ks, summarize, wilson


def test_pass_at_k_is_the_part_of_all_subsets_that_hold_a_right_answer():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([index < c for index in range(n)], k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="k is 3"):
        pass_at_k(2, 1, 3)


def test_pass_at_k_is_unbiased():
    draw = random.Random(1)
    rate, n, k = 0.3, 8, 4
    estimates = [pass_at_k(n, sum(draw.random() < rate for _ in range(n)), k) for _ in range(20_000)]
    assert sum(estimates) / len(estimates) == pytest.approx(1 - (1 - rate) ** k, abs=0.01)


def test_powers_of_two_and_all_samples_are_told():
    assert [shown_ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("mean", "count", "ends"),
    [(0.5, 100, (0.4038, 0.5962)), (0.0, 10, (0.0, 0.2775)), (1.0, 10, (0.7225, 1.0)), (0.0, 0, (0.0, 1.0))],
)
def test_wilsons_interval_is_the_published_one(mean, count, ends):
    assert wilson(mean, count) == pytest.approx(ends, abs=1e-4)


def test_the_bootstrap_is_the_same_for_the_same_seed_and_covers_the_mean():
    draw = random.Random(0)
    values = [draw.gauss(2.0, 1.0) for _ in range(200)]
    low, high = bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) == (low, high) != bootstrap(values, seed=4)
    assert low < sum(values) / len(values) < high
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(200), rel=0.25)
    assert bootstrap([1.0]) == (1.0, 1.0)


def answers(*corrects: bool, tokens: int = 10, truncated: bool = False) -> list[Answer]:
    return [Answer(correct, 2.0 * correct - 1.0, tokens, truncated) for correct in corrects]


def test_a_problem_counts_once_however_many_samples_it_has():
    summary = summarize([answers(True, True, True, True), answers(False, False, tokens=40, truncated=True)])
    assert (summary.problem_count, summary.samples_per_problem) == (2, 2)
    assert (summary.accuracy, summary.reward_mean, summary.pass_at) == (0.5, 0.0, {1: 0.5, 2: 0.5})
    assert (summary.tokens_mean, summary.truncated_fraction) == (20.0, pytest.approx(1 / 3))
    assert summary.accuracy_interval == wilson(0.5, 2)
    with pytest.raises(ValueError, match="no answers"):
        summarize([])


def test_each_role_has_a_mean_over_the_answers_in_which_it_had_a_turn():
    first, both = {"white": (1.0, True)}, {"white": (0.0, False), "black": (0.5, True)}
    problems = [
        [Answer(True, 1.0, 1, False, first), Answer(False, 0.25, 1, False, both)],
        [Answer(True, 1.0, 1, False)],
    ]
    assert summarize(problems).roles == {"white": RoleFigures(0.5, 0.5, 2), "black": RoleFigures(0.5, 1.0, 1)}
