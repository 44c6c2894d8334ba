"""The task sequence as a pure function of seed and position."""

from __future__ import annotations

from collections import Counter

from slipstream.orchestrator.tasks import MixtureEntry, TaskSequence, evaluation_tasks

ENTRIES = [MixtureEntry("words", 3.0, 10_000), MixtureEntry("numbers", 1.0, 500)]


def test_two_sequences_with_the_same_seed_agree_in_any_order() -> None:
    first, second = TaskSequence(7, ENTRIES), TaskSequence(7, ENTRIES)
    forwards = [first.task(position) for position in range(200)]
    backwards = [second.task(position) for position in reversed(range(200))]
    assert forwards == backwards[::-1]
    assert forwards != [TaskSequence(8, ENTRIES).task(position) for position in range(200)]


def test_every_window_holds_the_environments_in_proportion() -> None:
    tasks = TaskSequence(0, ENTRIES)
    for start in range(0, 400, 13):
        counts = Counter(tasks.environment_of(position) for position in range(start, start + 32))
        assert 7 <= counts["numbers"] <= 9


def test_tasks_stay_inside_their_task_set() -> None:
    tasks = TaskSequence(1, ENTRIES)
    seen = [tasks.task(position) for position in range(2_000)]
    assert all(0 <= task.index < (500 if task.environment == "numbers" else 10_000) for task in seen)
    assert all(task.split == "train" for task in seen)


def test_an_evaluation_asks_the_same_tasks_each_time() -> None:
    assert [task.index for task in evaluation_tasks("words", 3)] == [0, 1, 2]
    assert {task.split for task in evaluation_tasks("words", 3)} == {"held_out"}


def test_attempts_of_a_group_sample_with_different_seeds() -> None:
    tasks = TaskSequence(1, ENTRIES)
    seeds = {tasks.sampling_seed("train-4", attempt) for attempt in range(1, 50)}
    assert len(seeds) == 49
    assert all(0 <= seed < 2**31 for seed in seeds)
