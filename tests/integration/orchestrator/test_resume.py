"""A second orchestrator on the journal of a first, and a run that ends at a position."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.api.run.v1 import run_pb2
from slipstream.orchestrator.config import BreakerConfig, EnvironmentConfig
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
        groups = await world.acquire(wait_ms=20_000)
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
        fresh = await world.acquire(wait_ms=20_000)
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
        groups = await world.acquire(wait_ms=20_000)
        await world.report(*map(world.finished, groups[:2]))
        plan = (await world.plan(1)).plan
        path = world.orchestrator.journal.path
        assert b'"kind":"sealed"' in path.read_bytes()[: synced[path.stat().st_ino]], "before the trainer has its plan"
        await world.train(plan)
        world.publish(1)
        groups += await world.acquire(wait_ms=20_000)
        await world.runs.PauseRun(run_pb2.PauseRunRequest(request_id="1", reason="the agents rest"), timeout=60)
        on_disk = path.read_bytes()[: synced[path.stat().st_ino]]
    path.write_bytes(on_disk)
    async with make_world(**fields) as world:
        run = await world.run()
        assert (run.step, run.state, run.reason) == (1, run_pb2.RUN_STATE_PAUSED, "the agents rest")
        known = {(group.position, group.attempt) for group in world.orchestrator.sequencer.machine}
        assert known == {(group.position, group.attempt) for group in groups[2:]}
        await world.report(*map(world.finished, groups[2:4]))
        assert (await world.plan(2)).HasField("plan")
        await world.runs.ResumeRun(run_pb2.ResumeRunRequest(request_id="2"), timeout=60)
        assert (await world.run()).state == run_pb2.RUN_STATE_RUNNING
    assert check_records(read_journal(path).records).processes == 2


async def test_a_call_that_is_cut_off_while_the_journal_is_written_is_answered_the_same_when_it_is_repeated(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        written.wait(30)
        fsync(descriptor)

    async with make_world(runner_lease_ttl_s=60.0) as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1 and run.phase == "training")
        acquire = runner_pb2.AcquireGroupsRequest(
            request_id="a", runner_id="runner-1", runner_epoch="1", max_groups=4, wait_ms=5000
        )
        create = rollout_pb2.CreateRolloutRequest(request_id="c", prompt="hello", sample_count=1)
        monkeypatch.setattr(os, "fsync", slow_fsync)

        async def cut_off_and_repeated(call: Any, request: Any) -> Any:
            written.clear()
            try:
                with pytest.raises(grpc.aio.AioRpcError) as cut:
                    await call(request, timeout=1.0)
                assert cut.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            finally:
                written.set()
            return await call(request, timeout=60)

        groups = (await cut_off_and_repeated(world.runners.AcquireGroups, acquire)).groups
        known = {(group.position, group.attempt) for group in world.orchestrator.sequencer.machine}
        assert {(group.position, group.attempt) for group in groups} == known
        assert len(known) == 4
        created = (await cut_off_and_repeated(world.rollouts.CreateRollout, create)).rollout
        listed = await world.rollouts.ListRollouts(rollout_pb2.ListRolloutsRequest(), timeout=60)
        assert [rollout.group_id for rollout in listed.rollouts] == [created.group_id]


async def test_a_run_that_failed_by_an_environment_gets_another_try(make_world: Make, background: Background) -> None:
    fields = {
        "groups_per_step": 1,
        "failing_environment_timeout_s": 1.0,
        "breaker": BreakerConfig(open_after_failures=2, first_pause_s=0.1, max_pause_s=0.2),
        "environments": [EnvironmentConfig(name="words")],
    }
    async with make_world(**fields) as world:

        async def runner() -> None:
            world.publish(0)
            while True:
                if groups := await world.acquire(count=2):
                    await world.report(*map(world.failed, groups))

        async with background(runner()):
            run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_FAILED)
        assert "failed in a row" in run.reason
    async with make_world(**fields) as world:
        assert not (await world.run()).warnings, "nothing is backed off"
        world.publish(0)
        groups = await world.acquire(wait_ms=20_000)
        await world.report(*map(world.finished, groups))
        assert (await world.plan(1)).HasField("plan")


async def test_while_engines_are_waited_for_no_environment_fails_any_longer(make_world: Make) -> None:
    fields = {
        "breaker": BreakerConfig(open_after_failures=2, first_pause_s=30.0, max_pause_s=30.0),
        "environments": [EnvironmentConfig(name="words")],
    }
    async with make_world(**fields) as world:
        world.publish(0)
        groups = await world.acquire(count=2, wait_ms=20_000)
        await world.report(*map(world.failed, groups))
        assert "is backed off" in (await world.run()).reason
    async with make_world(failing_environment_timeout_s=0.1, start_timeout_s=1.5, **fields) as world:
        run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_FAILED)
        assert ["is backed off" in warning for warning in run.warnings] == [True]
        assert run.reason.startswith("no version was served after ")


async def test_a_restarted_orchestrator_knows_the_groups_of_third_parties_and_what_it_had_backed_off(
    make_world: Make,
) -> None:
    fields = {
        "groups_per_step": 1,
        "breaker": BreakerConfig(open_after_failures=1, first_pause_s=30.0, max_pause_s=30.0),
        "environments": [EnvironmentConfig(name="words")],
    }
    asked = [
        rollout_pb2.CreateRolloutRequest(
            request_id=f"third-{number}", prompt="hello", sample_count=1, labels={"n": "1"}
        )
        for number in range(3)
    ]
    async with make_world(**fields) as world:
        world.publish(0)
        created = [(await world.rollouts.CreateRollout(request)).rollout.group_id for request in asked]
        groups = await world.acquire(count=2, wait_ms=20_000)
        assert [group.group_id for group in groups] == created[:2]
        await world.report(world.finished(groups[0]))
        others = await world.acquire(count=2, wait_ms=20_000)
        (training,) = [group for group in others if group.group_id not in created]
        await world.report(world.failed(training))
        before = (await world.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(group_id=created[0]))).rollout
        reason = (await world.run()).reason
        assert "is backed off and tried now and then" in reason
    async with make_world(**fields) as world:
        run = await world.run()
        assert (run.state, run.reason) == (run_pb2.RUN_STATE_PAUSED, reason)
        after = (await world.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(group_id=created[0]))).rollout
        assert after == before
        again = [(await world.rollouts.CreateRollout(request)).rollout for request in asked]
        assert [rollout.group_id for rollout in again] == created, "a repeat starts nothing"
        queued = rollout_pb2.ROLLOUT_STATE_QUEUED
        assert [rollout.state for rollout in again] == [rollout_pb2.ROLLOUT_STATE_FINISHED, queued, queued]
        assert [dict(rollout.labels) for rollout in again] == [{"n": "1"}] * 3
        seen = max(rollout.sequence for rollout in again)
        assert min(rollout.sequence for rollout in again[1:]) > before.sequence, (
            "a watcher that goes on sees them change"
        )
        other = rollout_pb2.CreateRolloutRequest(request_id="third-1", prompt="other", sample_count=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.rollouts.CreateRollout(other)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        world.publish(0)
        taken = await world.acquire(count=2, wait_ms=20_000)
        assert [(group.group_id, group.attempt) for group in taken] == [(created[1], 2), (created[2], 2)]
        await world.report(*map(world.finished, taken))
        ended = (await world.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(group_id=created[1]))).rollout
        assert (ended.state, ended.sequence > seen) == (rollout_pb2.ROLLOUT_STATE_FINISHED, True)


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
