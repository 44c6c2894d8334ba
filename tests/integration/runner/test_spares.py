"""Groups with spare members: the first that end are taken, the others are given up at the workers and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.environments.config import ImportedConfig

FINISHED = runner_pb2.GROUP_OUTCOME_FINISHED


def decodes(world: Any) -> list[Any]:
    return [request for worker in world.workers.values() for request in worker.decodes]


def given_up(report: runner_pb2.GroupReport) -> tuple[int, int]:
    return report.given_up_count, report.given_up_token_count


async def test_the_first_members_that_end_are_the_group(start_world: Any) -> None:
    world = await start_world()
    worker = world.workers["decode-1"]
    worker.early = [3, 1]
    worker.gate.clear()
    report = await world.report(await world.give(samples=5, needed=2))
    assert (report.outcome, [record.sample_index for record in report.rollouts]) == (FINISHED, [1, 3])
    assert [record.reward for record in report.rollouts] == [0.5, 0.5]
    assert given_up(report) == (3, 0)
    assert ("aborted", "decode-1", "g1.1.1") in world.events
    await world.until(lambda: "place/g1.1.1" in world.router.released)


async def test_of_members_that_end_together_no_more_than_are_needed_are_taken(start_world: Any) -> None:
    world = await start_world()
    report = await world.report(await world.give(samples=4, needed=3))
    assert [record.sample_index for record in report.rollouts] == [0, 1, 2]
    assert given_up(report) == (1, 2)
    # What it cost is given back: the experts of its tokens are of no use to anybody.
    worker = world.workers["decode-1"]
    await world.until(lambda: "d/g1.1.1.3" in worker.released_rows)
    assert not {f"d/g1.1.1.{index}" for index in range(3)} & set(worker.released_rows)


async def test_a_group_that_is_cancelled_while_its_spares_are_aborted_waits_for_that(start_world: Any) -> None:
    world = await start_world()
    worker = world.workers["decode-1"]
    worker.early, worker.abort_s = [1], 0.5
    worker.gate.clear()
    group_id = await world.give(samples=2, needed=1)
    await world.until(lambda: worker.abort_count > 0)
    world.orchestrator.cancelled[group_id] = "AGED_OUT"
    await world.orchestrator.tell()
    await world.until(lambda: ("acknowledged", "orchestrator", group_id) in world.events)
    kinds = [kind for kind, at, _ in world.events if at in ("decode-1", "orchestrator")]
    assert kinds == ["aborted", "acknowledged"]
    await world.until(lambda: "place/g1.1.1" in world.router.released)


async def test_members_that_had_ended_before_a_restart_are_the_group_after_it(start_world: Any, tmp_path: Path) -> None:
    file = tmp_path / "go"
    options = {"behaviour": "waits", "file": str(file)}
    world = await start_world(
        environments=[ImportedConfig(name="good", path="small_environment:Counting", options=options)]
    )
    worker = world.workers["decode-1"]
    worker.early = [2]
    worker.gate.clear()
    group_id = await world.give(samples=3, needed=1)
    await world.until(file.with_suffix(".asked").exists)
    await world.restart()
    file.touch()
    report = await world.report(group_id)
    assert (report.outcome, [record.sample_index for record in report.rollouts]) == (FINISHED, [2])
    assert len(decodes(world)) == 1
    assert report.given_up_count == 2


async def test_episodes_that_end_late_are_given_up_between_their_turns(start_world: Any, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    world = await start_world(
        environments=[ImportedConfig(name="turns", path="small_episodes:CountingDown", options=options)]
    )
    worker = world.workers["decode-1"]
    worker.gate_from = 3  # the turn that all begin with, and the second turn of two
    worker.gate.clear()
    report = await world.report(await world.give("turns", task_index=2, samples=4, needed=2))
    assert (report.outcome, len(report.rollouts), len(report.failures)) == (FINISHED, 2, 0)
    assert [record.reward for record in report.rollouts] == [1.0, 1.0]
    assert given_up(report) == (2, 4)  # their first turn
    await world.until(lambda: len(world.router.released) == len(world.router.asked))
    closed = tmp_path / "closed"
    await world.until(lambda: closed.exists() and closed.read_text() == "xxxx")


async def test_a_spare_member_takes_the_place_of_one_that_failed(start_world: Any) -> None:
    options = {"behaviour": "raises at setup"}  # the second
    world = await start_world(
        environments=[ImportedConfig(name="turns", path="small_episodes:CountingDown", options=options)]
    )
    report = await world.report(await world.give("turns", task_index=2, samples=3, needed=2))
    assert [record.sample_index for record in report.rollouts] == [0, 2]
    assert [failure.sample_index for failure in report.failures] == [1]
    assert given_up(report) == (0, 0)
