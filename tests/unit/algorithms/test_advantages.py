"""Advantages against their formulas."""

from __future__ import annotations

import pytest

from slipstream.algorithms.advantages import group_mean, group_normalized, leave_one_out, length_penalized, max_rl

ALL = [
    group_normalized,
    group_mean,
    leave_one_out,
    max_rl,
    lambda rewards: length_penalized(rewards, [5] * len(rewards)),
]


def test_group_normalized_is_the_distance_from_the_mean_over_the_standard_deviation():
    # mean 0.5, population std 0.5
    assert group_normalized([0.0, 1.0, 1.0, 0.0], eps=1e-4) == pytest.approx(
        [-0.5 / 0.5001, 0.5 / 0.5001, 0.5 / 0.5001, -0.5 / 0.5001]
    )


def test_group_mean_keeps_the_scale_of_the_rewards():
    assert group_mean([1.0, 0.0, 0.5, 0.1]) == pytest.approx([0.6, -0.4, 0.1, -0.3])


def test_leave_one_out_compares_with_the_others():
    assert leave_one_out([1.0, 0.0, 0.5]) == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])


def test_max_rl_weighs_rare_success_by_how_rare_it_is():
    assert max_rl([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])  # mean 1/4
    assert max_rl([1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


@pytest.mark.parametrize("rewards", [[-1.0, 1.0], [-2.0, 0.0, 1.0]])
def test_max_rl_of_a_group_without_a_positive_mean_is_nought(rewards: list[float]):
    assert max_rl(rewards) == [0.0] * len(rewards)


def test_length_penalized_favours_short_right_answers_and_no_short_wrong_ones():
    # lengths 10, 20, 30, 10: l = 0.5, 0, -0.5, 0.5; the last two are wrong, so min(0, l)
    rewards = [1.0 + 0.4 * 0.5, 1.0, 0.0 - 0.4 * 0.5, 0.0]
    mean = sum(rewards) / 4
    found = length_penalized([1.0, 1.0, 0.0, 0.0], [10, 20, 30, 10], weight=0.4)
    assert found == pytest.approx([reward - mean for reward in rewards])


def test_length_penalized_says_from_which_reward_on_an_answer_is_right():
    assert length_penalized([0.5, 0.5], [1, 2], weight=1.0, right_from=0.5) == pytest.approx([0.5, -0.5])
    assert length_penalized([0.5, 0.5], [1, 2], weight=1.0, right_from=0.6) == pytest.approx([0.25, -0.25])


def test_equal_lengths_leave_the_rewards_alone():
    assert length_penalized([1.0, 0.0], [7, 7]) == group_mean([1.0, 0.0])


@pytest.mark.parametrize("advantages", ALL)
@pytest.mark.parametrize("reward", [0.0, 0.7, -1.3, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_group_without_variance_teaches_exactly_nothing(advantages, reward: float, count: int):
    assert advantages([reward] * count) == [0.0] * count


@pytest.mark.parametrize("advantages", ALL)
def test_an_empty_group_has_no_advantages(advantages):
    assert advantages([]) == []


@pytest.mark.parametrize("advantages", ALL)
def test_advantages_of_a_group_add_up_to_nought_and_order_as_rewards_do(advantages):
    rewards = [0.9, 0.1, 0.4, 0.0, 0.6]
    found = advantages(rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    assert sorted(range(5), key=found.__getitem__) == sorted(range(5), key=rewards.__getitem__)
