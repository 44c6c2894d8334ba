"""Advantages against their formulas."""

from __future__ import annotations

import pytest

from slipstream.algorithms.advantages import group_normalized, leave_one_out


def test_group_normalized_is_the_distance_from_the_mean_over_the_standard_deviation():
    # mean 0.5, population std 0.5
    assert group_normalized([0.0, 1.0, 1.0, 0.0], eps=1e-4) == pytest.approx(
        [-0.5 / 0.5001, 0.5 / 0.5001, 0.5 / 0.5001, -0.5 / 0.5001]
    )


def test_a_group_without_variance_teaches_nothing():
    assert group_normalized([0.7, 0.7, 0.7]) == pytest.approx([0.0, 0.0, 0.0])
    assert leave_one_out([0.7, 0.7, 0.7]) == pytest.approx([0.0, 0.0, 0.0])


def test_leave_one_out_compares_with_the_others():
    assert leave_one_out([1.0, 0.0, 0.5]) == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])


def test_small_groups_have_no_advantage():
    assert group_normalized([]) == leave_one_out([]) == []
    assert leave_one_out([1.0]) == [0.0]
    assert group_normalized([1.0]) == [0.0]
