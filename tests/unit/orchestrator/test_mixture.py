"""Several environments in one run: what is filtered is refilled, and nothing of one is taken for the other's."""

from __future__ import annotations

from collections import Counter

from slipstream.algorithms.staleness import Group, StalenessMachine
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.assignments import Assigner
from slipstream.orchestrator.config import EnvironmentConfig
from slipstream.orchestrator.tasks import MixtureEntry, TaskSequence, group_id_of, position_of


def dispatched(machine: StalenessMachine) -> list[Group]:
    """All that may start now."""
    groups: list[Group] = []
    while (group := machine.dispatch()) is not None:
        groups.append(group)
    return groups


def test_a_filtered_group_gives_its_place_in_the_step_to_another_position():
    machine = StalenessMachine(4, 0, 2, lambda position: "words")
    assert [group.position for group in dispatched(machine)] == [0, 1, 2, 3]
    assert machine.scored(0, 1)
    for position in (1, 2, 3):  # all right, or all wrong
        assert machine.filtered(position, 1)
    assert machine.seal() is None
    refill = dispatched(machine)
    assert [group.position for group in refill] == [4, 5, 6]
    assert {group.dispatch_step for group in refill} == {0}  # of the same step: nothing crosses an update
    assert machine.filtered(4, 1)
    assert [group.position for group in dispatched(machine)] == [7]
    for position in (5, 6, 7):
        assert machine.scored(position, 1)
    sealed = machine.seal()
    assert sealed is not None
    assert [group.position for group in sealed.groups] == [0, 5, 6, 7]


def test_spare_members_are_those_of_training_groups_of_their_environment():
    names = ("spared", "whole")
    tasks = TaskSequence(7, [MixtureEntry(name, 1.0, 3) for name in names])
    configs = {name: EnvironmentConfig(name=name, spare_samples=3 * (name == "spared")) for name in names}
    assigner = Assigner("run", "float32", tasks, configs, 8)
    counts = {
        each.environment: (each.sample_count, each.needed_count)
        for position in range(8)
        for each in [assigner.training(Group(position, "", attempt=1), PolicyVersion(1, 0))]
    }
    assert counts == {"spared": (11, 8), "whole": (8, 0)}


def test_groups_of_environments_with_the_same_tasks_have_names_and_draws_of_their_own():
    names = ("one", "other")
    tasks = TaskSequence(7, [MixtureEntry(name, 1.0, 3) for name in names])
    configs = {name: EnvironmentConfig(name=name, train_task_count=3) for name in names}
    assigner = Assigner("run", "float32", tasks, configs, 8)
    assigned = [
        assigner.training(Group(position, tasks.environment_of(position), attempt=1), PolicyVersion(1, 0))
        for position in range(200)
    ]
    keys = Counter((each.environment, each.split, each.task_index) for each in assigned)
    assert set(keys) == {(name, "train", index) for name in names for index in range(3)}
    assert len({each.group_id for each in assigned}) == len({each.sampling.seed for each in assigned}) == 200
    assert [position_of(group_id_of(position)) for position in range(200)] == list(range(200))
    shares = Counter(each.environment for each in assigned)
    assert abs(shares["one"] - shares["other"]) <= 4
