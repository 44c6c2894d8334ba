"""Advantages by role: each role is compared with itself alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.advantages import Members, group_mean, group_normalized, leave_one_out
from slipstream.algorithms.role_advantages import RoleResult, by_role

ROLES = ("buyer", "judge", "seller")
FUNCTIONS = [group_mean, group_normalized, leave_one_out]
results = st.builds(RoleResult, reward=st.sampled_from([-1.0, 0.0, 0.25, 1.0]), token_count=st.integers(1, 9))
groups = st.lists(st.dictionaries(st.sampled_from(ROLES), results), min_size=1, max_size=8)


@given(groups, st.sampled_from(FUNCTIONS))
def test_a_roles_advantages_are_those_of_a_group_of_it_alone(rollouts: list[dict[str, RoleResult]], function) -> None:
    found = by_role(lambda members: function(members.rewards), rollouts, 1e-6)
    spread = {role for role in ROLES if len({each[role].reward for each in rollouts if role in each}) > 1}
    if not spread:
        assert found is None
        return
    assert found is not None
    assert [set(each) for each in found] == [set(each) for each in rollouts]
    for role in ROLES:
        alone = function([each[role].reward for each in rollouts if role in each])
        assert [each[role] for each in found if role in each] == pytest.approx(alone)
        assert role in spread or not any(alone)


@given(groups, st.sampled_from(ROLES), st.floats(-5, 5))
def test_what_other_roles_earn_changes_nothing(rollouts: list[dict[str, RoleResult]], role: str, more: float) -> None:
    def of_role(group: list[dict[str, RoleResult]]) -> list[float]:
        found = by_role(lambda members: group_mean(members.rewards), group, 1e-6)
        return [each[role] for each in found or [dict.fromkeys(rollout, 0.0) for rollout in group] if role in each]

    moved = [
        {name: each if name == role else RoleResult(each.reward * more, 1) for name, each in rollout.items()}
        for rollout in rollouts
    ]
    assert of_role(moved) == of_role(rollouts)


def test_tokens_are_counted_by_role_and_small_differences_are_none() -> None:
    seen: list[list[int]] = []

    def advantages(members: Members) -> list[float]:
        seen.append(list(members.token_counts))
        return [7.0] * len(members.rewards)

    rollouts = [
        {"buyer": RoleResult(1.0, 3), "seller": RoleResult(0.5, 8)},
        {"buyer": RoleResult(0.0, 4), "seller": RoleResult(0.501, 9)},
    ]
    assert by_role(advantages, rollouts, 0.01) == [{"buyer": 7.0, "seller": 0.0}] * 2
    assert seen == [[3, 4]]
