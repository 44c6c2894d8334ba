"""Tasks are drawn by what their success rates let them teach, and the same again for the same rates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.environments.config_base import CurriculumConfig
from slipstream.orchestrator.config import EnvironmentConfig
from slipstream.orchestrator.curriculum import Curriculum, Rate
from slipstream.orchestrator.replay import History
from slipstream.orchestrator.tasks import MixtureEntry, TaskSequence


def curriculum(*, enabled: bool = True, parts: int | None = 4, task_count: int = 1000) -> Curriculum:
    config = EnvironmentConfig(
        name="sums",
        train_task_count=task_count,
        curriculum=CurriculumConfig(enabled=enabled, parts=parts, floor=0.1, memory_groups=4),
    )
    return Curriculum(TaskSequence(3, [MixtureEntry("sums", 1.0, task_count)]), {"sums": config})


def took(chosen: Curriculum, position: int, task: int, right: int, attempt: int = 1) -> dict[str, Any]:
    assignment = runner_pb2.GroupAssignment(
        environment="sums", position=position, attempt=attempt, task_index=task, sample_count=4
    )
    records = [runner_pb2.RolloutRecord(sample_index=index, correct=index < right) for index in range(4)]
    return chosen.took(assignment, records)


def test_parts_are_drawn_in_proportion_to_what_they_can_teach():
    chosen = curriculum()
    chosen.rates = {("sums", part): Rate(rate, 9) for part, rate in enumerate((0.5, 0.0, 1.0, 0.1))}
    counts = Counter((chosen.task_index(position) or 0) % 4 for position in range(8000))
    weights = [1.0, 0.1, 0.1, 0.36]
    expected = [8000 * weight / sum(weights) for weight in weights]
    assert [counts[part] for part in range(4)] == pytest.approx(expected, rel=0.15)


def test_a_part_that_is_always_right_makes_room_and_comes_back_when_it_is_forgotten():
    chosen = curriculum()
    for position in range(12):
        took(chosen, position, 4 * position, right=4)
    assert chosen.rates["sums", 0].rate > 0.95
    early = sum((chosen.task_index(position) or 0) % 4 == 0 for position in range(2000))
    assert 20 < early < 120
    for position in range(12, 16):
        took(chosen, position, 4 * position, right=1)
    again = sum((chosen.task_index(position) or 0) % 4 == 0 for position in range(2000, 4000))
    assert again > 4 * early


def test_the_same_rates_choose_the_same_tasks_and_a_position_keeps_its_own():
    first, second = curriculum(), curriculum()
    for each in (first, second):
        for position in range(6):
            took(each, position, position, right=position % 5)
    assert [first.task_index(p) for p in range(100)] == [second.task_index(p) for p in reversed(range(100))][::-1]
    kept = [first.task_index(position) for position in range(100)]
    for position in range(100, 160):
        took(first, position, position, right=0)
    assert [first.task_index(position) for position in range(100)] == kept


def test_what_the_records_say_is_what_another_process_goes_on_from():
    chosen = curriculum()
    task = chosen.task_index(0)
    assert task is not None
    records: list[dict[str, Any]] = [
        {"kind": "run", "run_id": "r", "seed": 3},
        {"kind": "acquired", "position": 0, "attempt": 1, "version": "1.0", "runner": "r", "task": task},
    ]
    said = took(chosen, 0, task, right=3)
    records += [
        {"kind": "reported", "position": 0, "attempt": 1, **said},
        {"kind": "reopened", **{"position": 0, "attempt": 1}},
    ]
    history = History(lambda _: "sums")
    for record in records:
        history.take(record)
    again = curriculum()
    again.restore(history)
    assert again.rates == chosen.rates
    assert again.task_index(0) == task
    # The runner reports what it holds once more: it is no other group.
    assert took(again, 0, task, right=3) == {}
    assert again.rates == chosen.rates
    assert took(again, 0, task, right=3, attempt=2)["success"][3] == 2


def test_without_parts_each_task_has_a_rate_of_its_own():
    chosen = curriculum(parts=None, task_count=50)
    took(chosen, 0, 7, right=4)
    took(chosen, 1, 8, right=0)
    assert set(chosen.rates) == {("sums", 7), ("sums", 8)}
    assert chosen.fields()["parts_asked_by_environment"] == {"sums": 2}
    assert chosen.fields()["success_rate_by_part"] == {}


def test_where_it_is_not_enabled_the_sequence_has_its_tasks():
    chosen = curriculum(enabled=False)
    assert (chosen.task_index(5), took(chosen, 5, 1, right=2), chosen.fields()) == (None, {}, {})


def test_figures_name_the_rates_of_a_few_parts():
    chosen = curriculum()
    took(chosen, 0, 1, right=4)
    took(chosen, 1, 2, right=0)
    assert chosen.fields() == {
        "success_rate_by_environment": {"sums": 0.5},
        "parts_asked_by_environment": {"sums": 2},
        "success_rate_by_part": {"sums/1": 0.75, "sums/2": 0.25},
    }
    chosen.forget_all_but([1])
    assert took(chosen, 1, 2, right=0) == {}  # still counted


def test_a_rollout_of_several_roles_is_as_right_as_those_of_them_that_train():
    chosen = curriculum()
    roles = [
        runner_pb2.RoleReward(role="white", correct=True),
        runner_pb2.RoleReward(role="black", correct=False),
        runner_pb2.RoleReward(role="judge", correct=True, untrained=True),
    ]
    assignment = runner_pb2.GroupAssignment(environment="sums", attempt=1, sample_count=4)
    records = [runner_pb2.RolloutRecord(sample_index=index, role_rewards=roles) for index in range(4)]
    assert chosen.took(assignment, records)["success"] == ["sums", 0, 0.5, 1]
