"""A second orchestrator on the journal of a first, and a run that ends at a position."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.run.v1 import run_pb2
from slipstream.orchestrator.config import EnvironmentConfig
from slipstream.orchestrator.journal import read_journal
from slipstream.orchestrator.journal_check import check_records

Make = Callable[..., Any]
Background = Callable[..., Any]


def attempt_of(group: runner_pb2.GroupAssignment) -> runner_pb2.GroupAttempt:
    return runner_pb2.GroupAttempt(group_id=group.group_id, attempt=group.attempt)


async def test_a_restarted_orchestrator_goes_on_with_what_runners_have_once_engines_say_what_they_serve(
    make_world: Make,
) -> None:
    fields = {"total_steps": 3, "groups_per_step": 2, "runner_lease_ttl_s": 60.0}
    async with make_world(**fields) as world:
        world.publish(0)
        groups = await world.acquire(wait_ms=3000)
        assert [group.position for group in groups] == [0, 1, 2, 3]
        await world.report(*map(world.finished, groups[:3]))
        await world.train((await world.plan(1)).plan)
    async with make_world(**fields) as world:
        assert await world.acquire(wait_ms=300) == [], "no worker has said yet what it serves"
        assert (await world.run()).step == 1
        running = await world.heartbeat(running=[attempt_of(groups[3])])
        assert not running.cancellations
        late = await world.report(world.finished(groups[0]), world.finished(groups[2]), world.finished(groups[3]))
        assert [attempt.group_id for attempt in late.refused] == [groups[0].group_id]
        plan = (await world.plan(2)).plan
        names = {sequence.group_id for batch in plan.micro_batches for sequence in batch.sequences}
        assert names == {groups[2].group_id, groups[3].group_id}
        world.publish(1)
        fresh = await world.acquire(wait_ms=5000)
        assert [(group.position, group.attempt) for group in fresh][:2] == [(4, 1), (5, 1)]
        assert {group.dispatch_version.step for group in fresh} == {1}
        path = world.orchestrator.journal.path
    assert check_records(read_journal(path).records).processes == 2


async def test_what_was_acknowledged_outlives_a_loss_of_power(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine that loses power there is on disk what was synced, and maybe nothing else."""
    fields = {"total_steps": 3, "groups_per_step": 2, "runner_lease_ttl_s": 60.0}
    synced: dict[int, int] = {}
    fsync = os.fsync

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    monkeypatch.setattr(os, "fsync", noting_fsync)
    async with make_world(**fields) as world:
        world.publish(0)
        groups = await world.acquire(wait_ms=3000)
        await world.report(*map(world.finished, groups[:2]))
        await world.train((await world.plan(1)).plan)
        world.publish(1)
        groups += await world.acquire(wait_ms=5000)
        await world.runs.PauseRun(run_pb2.PauseRunRequest(request_id="1", reason="the agents rest"), timeout=10)
        path = world.orchestrator.journal.path
        on_disk = path.read_bytes()[: synced[path.stat().st_ino]]
    path.write_bytes(on_disk)
    async with make_world(**fields) as world:
        run = await world.run()
        assert (run.step, run.state, run.reason) == (1, run_pb2.RUN_STATE_PAUSED, "the agents rest")
        known = {(group.position, group.attempt) for group in world.orchestrator.sequencer.machine}
        assert known == {(group.position, group.attempt) for group in groups[2:]}
        await world.report(*map(world.finished, groups[2:4]))
        assert (await world.plan(2)).HasField("plan")
        await world.runs.ResumeRun(run_pb2.ResumeRunRequest(request_id="2"), timeout=10)
        assert (await world.run()).state == run_pb2.RUN_STATE_RUNNING
    assert check_records(read_journal(path).records).processes == 2


async def test_a_run_of_so_many_positions_ends_with_what_is_left_for_its_last_step(
    make_world: Make, background: Background
) -> None:
    words = EnvironmentConfig(name="words", age_out="hold")
    async with make_world(total_steps=9, total_positions=10, groups_per_step=4, environments=[words]) as world:
        loops = world.runner_loop(filtered_every=10_000), world.heartbeat_loop(), world.trainer_loop()
        async with background(*loops):
            run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_FINISHED)
        assert run.reason == "all 3 steps are trained"
        assert [plan.last for plan in world.plans] == [False, False, True]
        checked = check_records(read_journal(world.orchestrator.journal.path).records, prefix=10)
        assert len(checked.attempts) == 10
