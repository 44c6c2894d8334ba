"""A few steps through a whole orchestrator, over gRPC."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from prometheus_client import REGISTRY

from slipstream.algorithms.staleness import Outcome
from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.api.run.v1 import run_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import RolloutUnknown, RunnerSuperseded, StepNotNext, StepNotSealed, from_rpc_error
from slipstream.common.state import SERVING
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import BreakerConfig, DiskConfig
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.orchestrator.journal import read_journal
from slipstream.orchestrator.replay import unpacked

Make = Callable[..., Any]


@pytest.mark.parametrize("bound", [0, 2])
async def test_a_run_trains_every_step_evaluates_and_finishes(make_world: Make, background: Make, bound: int) -> None:
    async with make_world(
        total_steps=4, max_off_policy_steps=bound, step_quotas=True, evaluate_before=True, evaluate_after=True
    ) as world:
        async with background(world.runner_loop(), world.heartbeat_loop(), world.trainer_loop()):
            run = await world.until(lambda run: run.phase == "ended")
        assert (run.state, run.step) == (run_pb2.RUN_STATE_FINISHED, 4), run.reason
        assert [(a.evaluation, a.environment, a.problem_count, a.step) for a in run.accuracies] == [
            ("before", "words", 6, 0),
            ("before", "numbers", 3, 0),
            ("after", "words", 6, 4),
            ("after", "numbers", 3, 4),
        ]
        assert len(world.trained) == 4 * 4 * 2
        assert set(world.trained.values()) == {1}
        for plan in world.plans:
            for batch in plan.micro_batches:
                for sequence in batch.sequences:
                    assert 0 <= plan.version.step - 1 - sequence.dispatch_version.step <= bound
        steps = world.metrics("step")
        assert [record["step"] for record in steps] == [1, 2, 3, 4]
        assert all(set(record["reward_by_environment"]) <= {"words", "numbers"} for record in steps)
        assert all(0 < record["reward_mean"] <= 1 for record in steps), "the last one's, too"
        assert all(record["lag_max"] <= bound and record["groups_trained"] == 4 for record in steps)
        assert {record["kind"] for record in world.metrics("update")} == {"update"}
        training = [a for a in world.assignments if a.purpose == runner_pb2.GROUP_PURPOSE_TRAINING]
        held_out = [a for a in world.assignments if a.purpose == runner_pb2.GROUP_PURPOSE_EVALUATION]
        assert {(a.split, a.sample_count, a.sampling.temperature) for a in held_out} == {("held_out", 1, 0.0)}
        assert {a.salt for a in training} <= {f"{run.run_id}/1/{step}/float32" for step in range(4)}

        records: list[dict[str, Any]] = read_journal(world.orchestrator.journal.path).records
        sealed = [record for record in records if record["kind"] == "sealed"]
        assert [unpacked(record["plans"][0]) for record in sealed] == world.plans
        ends = [r["position"] for r in records if r["kind"] == "ended"] + [p for s in sealed for p in s["positions"]]
        assert sorted(ends) == list(range(world.orchestrator.sequencer.machine.next_position)), "one outcome each"


async def test_held_out_tasks_are_asked_while_training_goes_on(make_world: Make, background: Make) -> None:
    async with make_world(total_steps=8, evaluate_every_steps=2, evaluate_after=True) as world:
        async with background(world.runner_loop(), world.heartbeat_loop(), world.trainer_loop()):
            run = await world.until(lambda run: run.phase == "ended")
        assert (run.state, run.step) == (run_pb2.RUN_STATE_FINISHED, 8), run.reason
        asked = [(a.evaluation, a.step) for a in run.accuracies if a.environment == "words"]
        *between, last = asked
        assert last == ("after", 8)
        assert between
        assert all(name == f"step-{step}" and 2 <= step < 8 for name, step in between)
        assert len({step for _, step in between}) == len(between)
        assert [record["phase"] for record in world.metrics("phase")].count("training") == 1
        assert len(world.trained) == 8 * 4 * 2, "no step waits for it"
        assert not [name for name in world.trained if not name.startswith("train-")]
        asked = [a for a in world.assignments if a.purpose == runner_pb2.GROUP_PURPOSE_EVALUATION]
        assert {a.position for a in asked} == {-1}


async def test_training_waits_for_no_evaluation(make_world: Make, background: Make) -> None:
    """Nobody answers it, and what is trained and served goes on all the same."""
    async with make_world(total_steps=6, evaluate_every_steps=2) as world:
        kept: set[str] = set()

        async def runner() -> None:
            while True:
                groups = await world.acquire(count=4)
                held_out = [g for g in groups if g.purpose == runner_pb2.GROUP_PURPOSE_EVALUATION]
                kept.update(group.group_id for group in held_out)
                reports = [world.finished(group) for group in groups if group not in held_out]
                if reports:
                    await world.report(*reports)

        async with background(runner(), world.heartbeat_loop(), world.trainer_loop()):
            run = await world.until(lambda run: run.step == 6 and run.serving.step == 6)
        assert kept
        assert not run.accuracies


async def test_an_evaluation_takes_its_share_of_the_slots_and_training_the_rest(
    make_world: Make, background: Make
) -> None:
    asking = EvaluationConfig(samples=2, share=0.4)
    async with make_world(total_steps=4, groups_per_step=5, evaluate_every_steps=2, evaluation=asking) as world:
        world.publish(0)
        await world.until(lambda run: run.phase == "training")
        for step in (1, 2):
            groups = [group for _ in range(3) for group in await world.acquire()]
            await world.report(*(world.finished(group) for group in groups))
            await world.train((await world.plan(step)).plan)
        await world.until(lambda run: run.serving.step == 2)

        async with asyncio.timeout(60):
            groups = []
            while not [g for g in groups if g.purpose == runner_pb2.GROUP_PURPOSE_EVALUATION]:
                groups += await world.acquire(count=10)
        groups += await world.acquire(count=10)
        held_out = [group for group in groups if group.purpose == runner_pb2.GROUP_PURPOSE_EVALUATION]
        bound = world.orchestrator.sequencer.machine.admission_bound
        assert 1 <= len(held_out) <= 0.4 * bound
        assert {(group.sample_count, group.sampling.temperature) for group in held_out} == {(2, 1.0)}
        assert [group for group in groups if group.purpose == runner_pb2.GROUP_PURPOSE_TRAINING]

        async with background(world.runner_loop(filtered_every=1 << 30), world.heartbeat_loop()):
            await world.report(*(world.finished(group) for group in groups))
            run = await world.until(lambda run: len(run.accuracies) == 2)
        words = next(a for a in run.accuracies if a.environment == "words")
        assert (words.evaluation, words.problem_count, words.sample_count, words.unanswered_count) == (
            "step-2",
            6,
            2,
            0,
        )
        assert (words.accuracy, words.mean_reward, dict(words.pass_at_k)) == (0.5, 0.5, {1: 0.5, 2: 1.0})
        assert words.accuracy_low < 0.5 < words.accuracy_high
        assert (words.oldest_version.step, words.newest_version.step) == (2, 2)
        record = next(r for r in world.metrics("evaluation") if r["environment"] == "words")
        assert (record["version_min"], record["version_max"], record["pass_at_k"]) == (
            "1.2",
            "1.2",
            {"1": 0.5, "2": 1.0},
        )


async def test_a_run_that_only_evaluates_asks_each_problem_and_ends(make_world: Make, background: Make) -> None:
    async with make_world(evaluate_only=True, evaluation=EvaluationConfig(samples=3)) as world:
        world.publish(0)
        async with background(world.runner_loop(filtered_every=1 << 30), world.heartbeat_loop()):
            run = await world.until(lambda run: run.phase == "ended")
        assert (run.state, run.step, run.reason) == (run_pb2.RUN_STATE_FINISHED, 0, "the held-out problems are asked")
        assert [(a.evaluation, a.environment, a.problem_count, a.sample_count) for a in run.accuracies] == [
            ("eval", "words", 6, 3),
            ("eval", "numbers", 3, 3),
        ]
        assert {a.purpose for a in world.assignments} == {runner_pb2.GROUP_PURPOSE_EVALUATION}
        assert {a.dispatch_version.step for a in world.assignments} == {0}


@pytest.mark.parametrize("answered", [0, 2])
async def test_an_evaluation_that_is_not_answered_ends_in_time_with_what_it_has(
    make_world: Make, background: Make, answered: int
) -> None:
    async with make_world(total_steps=1, evaluate_before=True, stall_timeout_s=1e6, pool_timeout_s=1e6) as world:
        world.publish(0)
        async with background(world.heartbeat_loop()):
            async with asyncio.timeout(60):
                groups = []
                while len(groups) < 9:
                    groups += await world.acquire()
            if answered:
                await world.report(*(world.finished(group) for group in groups[:answered]))
            later_s = 2 * EvaluationConfig().timeout_s
            world.orchestrator.supervisor._clock = lambda: time.monotonic() + later_s
            run = await world.until(lambda run: run.phase == "training")
            assert [(a.environment, a.problem_count, a.unanswered_count) for a in run.accuracies] == (
                [("words", 2, 4)] if answered else []
            )
            await world.until(lambda _: len(world.cancelled) >= 9 - answered)
            assert set(world.cancelled) == {(group.group_id, "EVALUATION_ENDED") for group in groups[answered:]}


async def test_the_run_ends_when_the_trainer_has_saved_however_long_its_disk_is_full(
    make_world: Make, background: Make
) -> None:
    async def say(activity: str) -> None:
        await world.batches.ReportActivity(batch_pb2.ReportActivityRequest(activity=activity), timeout=60)

    async with make_world(total_steps=2) as world:
        await say("training")
        async with background(world.runner_loop(), world.heartbeat_loop(), world.trainer_loop()):
            await world.until(lambda run: run.step == 2)
            await say("disk_full")
            run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_PAUSED)
            assert "the disk is full (DISK_FULL)" in run.reason
            await say("saving")
            run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_RUNNING)
            assert run.phase == "training"
            await say("ended")
            run = await world.until(lambda run: run.phase == "ended")
            assert run.state == run_pb2.RUN_STATE_FINISHED


async def test_while_the_disk_is_full_third_parties_fill_the_journals_buffer_and_no_more(
    make_world: Make, small_disk: Any
) -> None:
    disk = small_disk(4 << 20)
    fields = {"run_dir": disk.path, "journal_buffer_bytes": 2**16, "disk": DiskConfig(min_free_bytes=0)}
    async with make_world(**fields) as world:

        async def create() -> None:
            request = rollout_pb2.CreateRolloutRequest(request_id=uuid.uuid4().hex, prompt="x" * 9000, sample_count=1)
            created = (await world.rollouts.CreateRollout(request, timeout=60)).rollout
            cancel = rollout_pb2.CancelRolloutRequest(request_id=uuid.uuid4().hex, group_id=created.group_id)
            await world.rollouts.CancelRollout(cancel, timeout=60)

        async def fill() -> None:
            for _ in range(1000):
                await create()

        await create()
        disk.fill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fill()
        error = from_rpc_error(caught.value)
        assert (error.reason, error.metadata["name"]) == ("DISK_FULL", "orchestrator.journal_buffer_bytes")
        assert 2**16 < world.orchestrator.journal.waiting_bytes < 2**17
        disk.free()
        async with asyncio.timeout(60):
            while world.orchestrator.journal.waiting_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await create()


async def test_trained_rows_are_released_and_versions_are_in_redis(make_world: Make, background: Make) -> None:
    async with make_world(total_steps=2) as world:
        async with background(world.runner_loop(), world.heartbeat_loop(), world.trainer_loop()):
            await world.until(lambda run: run.phase == "ended")
            async with asyncio.timeout(60):
                redis = world.orchestrator.redis
                while await redis.version(SERVING) != PolicyVersion(1, 2) or not await redis.leases():
                    await world.run()
            assert set(await redis.leases()) == {"runner/runner-1"}
        await world.orchestrator.releaser.flush()
        assert {f"{rollout}/{kind}" for rollout in world.trained for kind in "tl"} <= world.rows.released


async def test_the_decode_pool_is_updated_before_the_prefill_pool(make_world: Make) -> None:
    async with make_world() as world:
        world.publish(0)
        await world.until(lambda run: all(worker.state == "serving" for worker in run.workers))
        groups = await world.acquire()
        await world.report(*(world.finished(group) for group in groups))
        await world.train((await world.plan(1)).plan)
        await world.until(lambda run: run.serving.step == 1)
        applied = [replica for kind, replica, version in world.calls if (kind, version) == ("apply", "1.1")]
        assert applied == ["decode-1", "decode-2", "prefill-1"]


async def test_a_group_whose_advantages_fail_ends_alone_with_its_reason(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    advantage = {"type": "import", "path": "fragile_advantages:fragile"}
    async with make_world(advantage=advantage, min_reward_std=0.0, max_off_policy_steps=2) as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1)
        broken, *groups = await world.acquire()
        await world.report(world.finished(broken, spread=False), *(world.finished(group) for group in groups))
        plan = (await world.plan(1)).plan
        assert plan.sequence_count == sum(len(batch.sequences) for batch in plan.micro_batches)
        trained = {sequence.group_id for batch in plan.micro_batches for sequence in batch.sequences}
        assert broken.group_id not in trained
        assert {s.advantage for batch in plan.micro_batches for s in batch.sequences} == {0.0, 2.0}
        (failed,) = world.metrics("group_failed")
        assert (failed["group_id"], failed["reason"]) == (broken.group_id, "BAD_ADVANTAGES")
        assert "fragile_advantages:fragile fails with ZeroDivisionError" in failed["detail"]


async def test_workers_hear_of_the_end_of_a_versions_last_group_without_an_update(make_world: Make) -> None:
    async with make_world(max_off_policy_steps=2) as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1)
        late, *groups = await world.acquire()
        await world.report(*(world.finished(group) for group in groups))
        await world.train((await world.plan(1)).plan)
        await world.until(lambda run: run.serving.step == 1)
        await world.until(lambda run: all(worker.live == {"1.0", "1.1"} for worker in world.workers))
        updates = [call for call in world.calls if call[0] == "apply"]
        await world.report(world.finished(late))
        await world.until(lambda run: all(worker.live == {"1.1"} for worker in world.workers))
        assert [call for call in world.calls if call[0] == "apply"] == updates


async def test_a_worker_whose_update_fails_is_refitted_and_does_not_hold_serving_back(make_world: Make) -> None:
    async with make_world() as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1)
        world.workers[1].corrupt_applies = 2
        groups = await world.acquire()
        await world.report(*(world.finished(group) for group in groups))
        await world.train((await world.plan(1)).plan)
        run = await world.until(lambda run: run.serving.step == 1)
        assert {worker.replica for worker in run.workers if worker.state == "serving"} >= {"decode-1", "prefill-1"}
        await world.until(lambda run: all(w.state == "serving" and w.version.step == 1 for w in run.workers))
        assert [call for call in world.calls if call[1] == "decode-2" and call[2] == "1.1"] == [
            ("begin", "decode-2", "1.1"),
            ("corrupt", "decode-2", "1.1"),
        ] * 2 + [("begin", "decode-2", "1.1"), ("apply", "decode-2", "1.1")]


async def test_admission_stops_at_the_bound_and_opens_when_a_version_is_served(make_world: Make) -> None:
    async with make_world(total_steps=10, max_off_policy_steps=1) as world:
        world.publish(0)
        first = await world.acquire(wait_ms=20_000)
        assert len(first) == 2 * 4, "(serving + B + 1) * groups_per_step"
        assert await world.acquire(wait_ms=50) == []
        answer = await world.report(*(world.finished(group, spread=False) for group in first[:3]))
        assert len(answer.unneeded) == 3, "filtered: the rows may go"
        assert len(await world.acquire()) == 3, "a filtered group frees its slot at once"
        await world.report(*(world.finished(group) for group in first[3:7]))
        assert await world.acquire(wait_ms=50) == [], "scored groups hold their slots until they are trained"
        await world.train((await world.plan(1)).plan)
        assert len(await world.acquire(wait_ms=20_000)) == 4


async def test_a_run_whose_rewards_never_differ_ends_and_says_so(make_world: Make) -> None:
    async with make_world(total_steps=10, stall_timeout_s=600.0) as world:
        world.publish(0)
        groups = await world.acquire(wait_ms=20_000)
        await world.report(*(world.finished(group, spread=False) for group in groups[:3]))
        world.orchestrator.supervisor._clock = lambda: time.monotonic() + 601.0
        run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_FAILED)
        assert run.metrics["groups_filtered_since_step"] == 3
        assert "in phase training, as 3 groups were filtered in which all rollouts earned the same" in run.reason


async def test_what_grew_too_old_is_cancelled_before_the_update_and_started_again(make_world: Make) -> None:
    def shown(name: str, **labels: str) -> float:
        """What whoever scrapes is told, of both environments together."""
        both = ({"environment": environment, **labels} for environment in ("words", "numbers"))
        return sum(REGISTRY.get_sample_value(f"slipstream_orchestrator_{name}", each) or 0.0 for each in both)

    async with make_world(total_steps=5, max_off_policy_steps=0, over_sampling=2.0) as world:
        before = shown("groups_cancelled_total", reason="AGED_OUT")
        world.publish(0)
        groups = await world.acquire(wait_ms=20_000)
        assert len(groups) == 8
        assert shown("oldest_group_seconds") > 0
        assert shown("groups_dispatched_again_total") == 0
        waiting = asyncio.ensure_future(world.heartbeat(wait_ms=30_000))
        await asyncio.sleep(0.1)
        await world.report(*(world.finished(group) for group in groups[:4]))
        await asyncio.sleep(0.1)
        assert not waiting.done()  # no step is sealed before the trainer asks for it
        plan = (await world.plan(1)).plan
        answer = await asyncio.wait_for(waiting, 25.0)  # before its time is over
        assert {(c.group.group_id, c.reason) for c in answer.cancellations} == {
            (group.group_id, "AGED_OUT") for group in groups[4:]
        }
        assert shown("groups_cancelled_total", reason="AGED_OUT") - before == 4
        late = await world.report(world.finished(groups[4]))
        assert [attempt.group_id for attempt in late.refused] == [groups[4].group_id]
        # The update waits for the acknowledgements.
        await world.train(plan)
        await asyncio.sleep(0.3)
        assert (await world.run()).serving.step == 0
        await world.heartbeat(acknowledged=tuple(c.group for c in answer.cancellations))
        again = await world.acquire(wait_ms=20_000)
        assert [(g.group_id, g.attempt) for g in again[:4]] == [(g.group_id, 2) for g in groups[4:]]
        assert {g.dispatch_version.step for g in again} == {1}
        assert shown("groups_dispatched_again_total") == 4


async def test_a_dead_runners_groups_go_to_another_as_new_attempts(make_world: Make) -> None:
    async with make_world(runner_lease_ttl_s=0.6) as world:
        world.publish(0)
        first = await world.acquire(wait_ms=20_000)
        async with asyncio.timeout(60):
            while not (again := await world.acquire(epoch="2", wait_ms=1000)):
                pass
        assert [(g.group_id, g.attempt) for g in again] == [(g.group_id, 2) for g in first]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.report(world.finished(first[0]), epoch="1")
        assert isinstance(from_rpc_error(caught.value), RunnerSuperseded)
        answer = await world.report(world.finished(first[0]), epoch="2")
        assert len(answer.refused) == 1


async def test_a_restarted_runner_goes_on_with_what_it_names_and_the_rest_is_lost_at_once(make_world: Make) -> None:
    async with make_world(runner_lease_ttl_s=60.0) as world:
        world.publish(0)
        first = await world.acquire(wait_ms=20_000)
        running = [runner_pb2.GroupAttempt(group_id=first[0].group_id, attempt=1)]
        answer = await world.heartbeat(epoch="2", running=running)
        assert not answer.cancellations
        assert answer.orchestrator_epoch
        finished = await world.report(world.finished(first[1]), epoch="2")  # its predecessor had got so far
        assert not finished.refused
        assert not await world.acquire(epoch="2", wait_ms=0)
        await world.heartbeat(epoch="2", running=running, reported_to_epoch=answer.orchestrator_epoch)
        again = await world.acquire(epoch="2", wait_ms=20_000)
        assert [(g.group_id, g.attempt) for g in again] == [(g.group_id, 2) for g in first[2:]]
        late = await world.report(world.finished(first[0]), world.finished(first[2]), epoch="2")
        assert [attempt.group_id for attempt in late.refused] == [first[2].group_id]


async def test_a_repeated_report_tells_what_is_still_needed(make_world: Make) -> None:
    async with make_world(total_steps=6, groups_per_step=1) as world:

        async def plan(step: int, checkpoint: int) -> batch_pb2.GetPlanResponse:
            request = batch_pb2.GetPlanRequest(incarnation=1, step=step, wait_ms=20_000, checkpoint_step=checkpoint)
            return await world.batches.GetPlan(request, timeout=60)

        async def refused(group: runner_pb2.GroupAssignment) -> bool:
            return bool((await world.report(world.finished(group))).refused)

        world.publish(0)
        first, second = await world.acquire(2, wait_ms=20_000)
        await world.report(world.finished(first), world.finished(second))
        await world.train((await plan(1, 0)).plan)
        assert [await refused(first), await refused(second)] == [False, False]
        await plan(2, 1)  # the checkpoint covers the first: its rows were released
        assert [await refused(first), await refused(second)] == [True, False]


async def test_reports_plans_and_steps_answer_a_repeat_the_same(make_world: Make) -> None:
    async with make_world() as world:
        world.publish(0)
        groups = await world.acquire(wait_ms=20_000)
        await world.report(*(world.finished(group) for group in groups[:4]))
        repeat = await world.report(*(world.finished(group) for group in groups[:4]))
        assert not repeat.refused
        assert not repeat.unneeded
        first, second = await world.plan(1), await world.plan(1)
        assert first == second
        await world.train(first.plan)
        await world.train(first.plan)
        assert (await world.run()).step == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.plan(3, wait_ms=0)
        assert isinstance(from_rpc_error(caught.value), StepNotNext)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.batches.ReportStep(
                batch_pb2.ReportStepRequest(request_id="x", version=PolicyVersion(1, 2).to_proto())
            )
        assert isinstance(from_rpc_error(caught.value), StepNotSealed)
        pending = await world.plan(2, wait_ms=0)
        assert pending.pending.needed_group_count == 4


async def test_when_valkey_is_killed_admission_pauses_and_then_nothing_is_lost(
    make_world: Make, background: Make, own_valkey: Any
) -> None:
    async with make_world(redis_url=own_valkey.url, total_steps=10_000) as world:
        async with background(world.runner_loop(), world.heartbeat_loop(), world.trainer_loop()):
            await world.until(lambda run: run.step >= 2)
            own_valkey.kill()
            paused = await world.until(lambda run: run.state == run_pb2.RUN_STATE_PAUSED)
            assert "Redis" in paused.reason
            assert await world.acquire(wait_ms=100) == []
            own_valkey.start()
            await world.until(lambda run: run.state == run_pb2.RUN_STATE_RUNNING)
            # An empty server is filled again before admission opens.
            assert await world.orchestrator.redis.version(SERVING) >= PolicyVersion.from_proto(paused.serving)
            await world.until(lambda run: run.step >= paused.step + 5)
            await world.runs.StopRun(run_pb2.StopRunRequest(request_id="1"))
        assert set(world.trained.values()) == {1}
        machine = world.orchestrator.sequencer.machine
        assert sum(machine.outcomes.values()) + machine.open_groups == machine.next_position
        assert set(machine.outcomes) <= {Outcome.TRAINED, Outcome.FILTERED, Outcome.CANCELLED}
        trained = {int(name.removeprefix("train-").split(".")[0]) for name in world.trained}
        kept = {r["position"] for r in read_journal(world.orchestrator.journal.path).records if r["kind"] == "ended"}
        left = {group.position for group in machine}
        assert trained | kept | left == set(range(machine.next_position)), "no position is lost"


async def test_an_environment_that_only_fails_ends_the_run_with_a_sentence(make_world: Make) -> None:
    breaker = BreakerConfig(open_after_failures=4, first_pause_s=0.1)
    async with make_world(failing_environment_timeout_s=600.0, breaker=breaker) as world:
        world.publish(0)
        failures = 0
        while (await world.run()).phase != "ended":
            groups = await world.acquire(wait_ms=200)
            if groups:
                failures += len(groups)
                await world.report(*(world.failed(group) for group in groups))
            if len(world.metrics("environment")) == 2:  # both are backed off
                world.orchestrator.supervisor._clock = lambda: time.monotonic() + 601.0
        run = await world.run()
        assert run.state == run_pb2.RUN_STATE_FAILED
        said = re.fullmatch(
            r"(\d+) groups of environment '(\w+)' failed in a row, the last with: division by zero; "
            r"traceback in logs/runner-1\.log",
            run.reason,
        )
        assert said is not None
        newest = {record["environment"]: record for record in world.metrics("group_failed")}
        assert newest[said[2]]["groups_failed"] == newest[said[2]]["groups_ended"] >= int(said[1]) >= 4
        assert sum(record["groups_failed"] for record in newest.values()) <= failures
        assert (await world.plan(1)).HasField("ended")
        states = {(record["environment"], record["state"]) for record in world.metrics("environment")}
        assert states <= {("words", "backed_off"), ("numbers", "backed_off")}
        assert states
        assert failures < 40, "backed off, it is tried by single groups"


async def test_a_pool_that_stays_empty_ends_the_run_with_a_sentence(make_world: Make, background: Make) -> None:
    async with make_world(pool_timeout_s=0.5, total_steps=1000) as world:
        world.publish(0)
        async with background(world.heartbeat_loop()):
            await world.until(lambda run: run.serving.incarnation == 1)
            world.workers[2].state = 4  # draining: it takes nothing any more
            run = await world.until(lambda run: run.phase == "ended")
        assert run.state == run_pb2.RUN_STATE_FAILED
        assert run.reason == "the prefill pool had no routable worker for 0 s"


async def test_a_paused_run_hands_nothing_out_and_a_stopped_one_ends_for_everyone(make_world: Make) -> None:
    async with make_world() as world:
        world.publish(0)
        groups = await world.acquire(count=2, wait_ms=20_000)
        await world.runs.PauseRun(run_pb2.PauseRunRequest(request_id="1", reason="lunch"))
        assert await world.acquire(wait_ms=50) == []
        assert (await world.run()).reason == "lunch"
        await world.runs.ResumeRun(run_pb2.ResumeRunRequest(request_id="2"))
        assert await world.acquire(count=1)
        watched = [message async for message in _watch_after(world, "enough")]
        assert watched[-1].run.state == run_pb2.RUN_STATE_STOPPED
        beat = await world.heartbeat()
        assert {c.group.group_id for c in beat.cancellations} >= {group.group_id for group in groups}
        answer = await world.runners.AcquireGroups(
            runner_pb2.AcquireGroupsRequest(request_id="9", runner_id="runner-1", runner_epoch="1", max_groups=1)
        )
        assert answer.run_ended


async def _watch_after(world: Any, reason: str) -> AsyncIterator[Any]:
    stream = world.runs.WatchRun(run_pb2.WatchRunRequest(max_per_second=10))
    await world.runs.StopRun(run_pb2.StopRunRequest(request_id="3", reason=reason))
    async for message in stream:
        yield message


def references(message: Message) -> list[types_pb2.RowsRef]:
    """Every reference to rows inside a message."""
    if isinstance(message, types_pb2.RowsRef):
        return [message]
    found = []
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry:
            for each in value if descriptor.is_repeated else [value]:
                found += references(each)
    return found


async def test_third_parties_get_rollouts_beside_the_run(make_world: Make) -> None:
    async with make_world() as world:
        world.publish(0)
        request = rollout_pb2.CreateRolloutRequest(
            request_id=uuid.uuid4().hex,
            task=rollout_pb2.TaskRef(environment="words", split="held_out", index=5),
            sample_count=3,
        )
        created = (await world.rollouts.CreateRollout(request)).rollout
        assert (await world.rollouts.CreateRollout(request)).rollout.group_id == created.group_id
        other = rollout_pb2.CreateRolloutRequest(request_id=uuid.uuid4().hex, prompt="hello", sample_count=1)
        second = (await world.rollouts.CreateRollout(other)).rollout
        groups = await world.acquire(count=2, wait_ms=20_000)
        assert [(g.group_id, g.sample_count, g.purpose) for g in groups] == [
            (created.group_id, 3, runner_pb2.GROUP_PURPOSE_EXTERNAL),
            (second.group_id, 1, runner_pb2.GROUP_PURPOSE_EXTERNAL),
        ]
        assert (groups[0].task_index, groups[1].prompt) == (5, "hello")
        report = world.finished(groups[0])
        for record in report.rollouts:
            record.routes.add(holder="decode:1", key="d/secret", dtype="uint8")
        await world.report(report)
        ended = (await world.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(group_id=created.group_id))).rollout
        assert ended.state == rollout_pb2.ROLLOUT_STATE_FINISHED
        assert len(ended.records) == 3
        cancelled = await world.rollouts.CancelRollout(
            rollout_pb2.CancelRolloutRequest(request_id="c", group_id=second.group_id)
        )
        assert cancelled.rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED
        assert (await world.run()).external_group_counts == {"words": 1, "prompt": 1}
        assert not world.metrics("step")
        assert [c.reason for c in (await world.heartbeat()).cancellations] == ["CLIENT"]

        page = await world.rollouts.ListRollouts(rollout_pb2.ListRolloutsRequest(page_size=1))
        first = await anext(aiter(world.rollouts.WatchRollouts(rollout_pb2.WatchRolloutsRequest())))
        for answer in (ended, *page.rollouts, first.rollout):
            assert references(answer) == [], "what only the run's own services may use"
        assert references(report), "the test would see them"
        rest = await world.rollouts.ListRollouts(rollout_pb2.ListRolloutsRequest(page_token=page.next_page_token))
        assert [r.group_id for r in (*page.rollouts, *rest.rollouts)] == [created.group_id, second.group_id]
        assert not rest.next_page_token
        stream = world.rollouts.WatchRollouts(rollout_pb2.WatchRolloutsRequest(after_sequence=ended.sequence))
        message = await asyncio.wait_for(stream.read(), 60)
        assert message.rollout.group_id == second.group_id
        stream.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(group_id="nobody"))
        assert isinstance(from_rpc_error(caught.value), RolloutUnknown)


async def test_large_prompts_are_handed_out_in_answers_that_fit_a_message(make_world: Make) -> None:
    async with make_world() as world:
        world.publish(0)
        for _ in range(20):
            request = rollout_pb2.CreateRolloutRequest(request_id=uuid.uuid4().hex, prompt="x" * 2**20, sample_count=1)
            await world.rollouts.CreateRollout(request)
        sizes = []
        while sum(sizes) < 20:
            groups = await world.acquire(count=20 - sum(sizes), wait_ms=3000)
            sizes.append(len([group for group in groups if group.HasField("prompt")]))
        assert max(sizes) == 4


async def test_steps_of_which_nothing_is_known_end_the_run_which_says_so(make_world: Make, background: Make) -> None:
    async with make_world(total_steps=9, max_skipped_steps=2) as world:
        world.publish(0)
        async with background(world.runner_loop(), world.heartbeat_loop()):
            for step in (1, 2):
                answer = await world.plan(step)
                world.publish(step)
                request = batch_pb2.ReportStepRequest(
                    request_id=uuid.uuid4().hex,
                    version=answer.plan.version,
                    metrics={"nothing_known": 1.0, "logps_unknown": 9.0},
                    skipped=True,
                )
                await world.batches.ReportStep(request, timeout=60)
            run = await world.until(lambda run: run.phase == "ended")
        assert run.state == run_pb2.RUN_STATE_FAILED
        assert run.reason.startswith("2 steps in a row, 1 to 2, had no token whose log-probabilities are known: ")


async def test_a_skipped_step_ends_its_groups_as_skipped_and_three_in_a_row_end_the_run(
    make_world: Make, background: Make
) -> None:
    async def train(step: int, *, skipped: bool) -> None:
        answer = await world.plan(step)
        world.plans.append(answer.plan)
        world.publish(step)
        request = batch_pb2.ReportStepRequest(
            request_id=uuid.uuid4().hex, version=answer.plan.version, metrics={"loss": 0.5}, skipped=skipped
        )
        await world.batches.ReportStep(request, timeout=60)

    async with make_world(total_steps=9) as world:
        world.publish(0)
        async with background(world.runner_loop(), world.heartbeat_loop()):
            for step, skipped in enumerate([True, True, False, True, True], start=1):
                await train(step, skipped=skipped)
            assert (await world.run()).state == run_pb2.RUN_STATE_RUNNING
            await train(6, skipped=True)
            run = await world.until(lambda run: run.phase == "ended")
        assert run.state == run_pb2.RUN_STATE_FAILED
        path = world.orchestrator.sequencer.config.run_dir / "skipped-rollouts.json"
        assert run.reason == (
            f"3 steps in a row, 4 to 6, had a loss or gradient that is not finite; their rollouts are in {path}"
        )
        saved = json.loads(path.read_text())["steps"]
        assert [each["step"] for each in saved] == [4, 5, 6]
        sealed = [s.rollout_id for batch in world.plans[5].micro_batches for s in batch.sequences]
        assert saved[2]["rollout_ids"] == sealed
        outcomes = world.orchestrator.sequencer.machine.outcomes
        assert (outcomes[Outcome.SKIPPED], outcomes[Outcome.TRAINED]) == (5 * 4, 4)
        records = read_journal(world.orchestrator.journal.path).records
        assert [r["step"] for r in records if r["kind"] == "skipped"] == [1, 2, 4, 5, 6]
        assert [r.get("groups_skipped") for r in world.metrics("step")] == [4, 4, None, 4, 4, 4]


async def test_a_restored_trainer_takes_the_sealed_steps_after_its_checkpoint_once_more(
    make_world: Make, background: Make
) -> None:
    async def ask(step: int, incarnation: int = 1, checkpoint: int | None = None) -> batch_pb2.GetPlanResponse:
        request = batch_pb2.GetPlanRequest(
            incarnation=incarnation, step=step, wait_ms=20_000, checkpoint_step=checkpoint
        )
        return await world.batches.GetPlan(request, timeout=60)

    async def trained(step: int, incarnation: int = 1, loss: float = 0.5) -> None:
        version = PolicyVersion(incarnation, step)
        world.broadcaster.seal(version)
        request = batch_pb2.ReportStepRequest(
            request_id=uuid.uuid4().hex, version=version.to_proto(), metrics={"loss": loss}
        )
        await world.batches.ReportStep(request, timeout=60)

    def rows(plan: batch_pb2.Plan) -> set[str]:
        return {s.token_ids.key for batch in plan.micro_batches for s in batch.sequences}

    async with make_world(total_steps=6, max_off_policy_steps=1) as world:
        world.publish(0)
        async with background(world.runner_loop(), world.heartbeat_loop()):
            plans = []
            for step in range(1, 5):
                plans.append((await ask(step, checkpoint=0 if step < 3 else 2)).plan)
                if step < 4:
                    await trained(step)
            await world.until(lambda run: run.serving.step == 3)
            # Dies in step 4; what is left of its life is a checkpoint of step 2.
            sequencer = world.orchestrator.sequencer
            await world.orchestrator.releaser.flush()
            assert rows(plans[0]) | rows(plans[1]) <= world.rows.released
            assert not world.rows.released & (rows(plans[2]) | rows(plans[3]))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(2, incarnation=2, checkpoint=1)
            assert from_rpc_error(refused.value).reason == "STEP_NOT_NEXT"

            await trained(2, incarnation=2)
            again = [(await ask(step, incarnation=2, checkpoint=2)).plan for step in (3,)]
            await trained(3, incarnation=2, loss=0.25)
            await trained(3, incarnation=2, loss=0.25)
            again.append((await ask(4, incarnation=2, checkpoint=2)).plan)
            for plan, first in zip(again, plans[2:], strict=True):
                assert plan.version.incarnation == 2
                plan.version.incarnation = 1
                assert plan == first
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await ask(5)
            assert from_rpc_error(late.value).reason == "INCARNATION_SUPERSEDED"
            await trained(4, incarnation=2)
            run = await world.until(lambda run: run.serving.step == 4)
            assert (run.serving.incarnation, run.published.incarnation) == (2, 2)
            for step in (5, 6):
                await ask(step, incarnation=2, checkpoint=4)
                await trained(step, incarnation=2)
            await world.until(lambda run: run.phase == "ended")

        assert [r["step"] for r in world.metrics("step")] == [1, 2, 3, 4, 5, 6]
        assert [(r["step"], r["loss"]) for r in world.metrics("retrained")] == [(3, 0.25)]
        assert [(r["incarnation"], r["step"]) for r in world.metrics("restored")] == [(2, 2)]
        records = read_journal(world.orchestrator.journal.path).records
        assert [r["step"] for r in records if r["kind"] == "trained"] == [1, 2, 3, 4, 5, 6]
        assert sequencer.machine.outcomes[Outcome.TRAINED] == 6 * 4
        salts = {a.salt.split("/")[1] for a in world.assignments if a.dispatch_version.step >= 4}
        assert salts == {"2"}


async def test_a_full_runner_asks_for_the_checkpoint_that_lets_its_rows_go(make_world: Make) -> None:
    async def ask(step: int, checkpoint: int) -> batch_pb2.GetPlanResponse:
        request = batch_pb2.GetPlanRequest(incarnation=1, step=step, wait_ms=0, checkpoint_step=checkpoint)
        return await world.batches.GetPlan(request, timeout=60)

    async def heartbeat(spool_bytes: int) -> None:
        request = runner_pb2.HeartbeatRequest(
            runner_id="runner-1", runner_epoch="1", spool_bytes=spool_bytes, spool_limit_bytes=100
        )
        await world.runners.Heartbeat(request, timeout=60)

    async with make_world(total_steps=6, groups_per_step=1) as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1)
        await ask(1, 0)
        for group in await world.acquire(1):
            await world.report(world.finished(group))
        await world.train((await ask(1, 0)).plan)
        assert not (await ask(2, 0)).pending.checkpoint_due
        await heartbeat(100)
        assert (await ask(2, 0)).pending.checkpoint_due
        assert not (await ask(2, 1)).pending.checkpoint_due


async def test_a_checkpoint_of_the_run_is_asked_for_until_the_trainer_has_it(make_world: Make) -> None:
    async def ask(step: int, checkpoint: int | None) -> batch_pb2.GetPlanResponse:
        request = batch_pb2.GetPlanRequest(incarnation=1, step=step, wait_ms=50, checkpoint_step=checkpoint)
        return await world.batches.GetPlan(request, timeout=60)

    async def save() -> PolicyVersion:
        request = run_pb2.SaveCheckpointRequest(request_id="save")
        return PolicyVersion.from_proto((await world.runs.SaveCheckpoint(request, timeout=60)).version)

    async def asked() -> None:
        while not (await ask(2, 0)).checkpoint_asked:
            pass

    async with make_world(total_steps=6, groups_per_step=1) as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1)
        await ask(1, None)  # of a trainer that writes none
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await save()
        assert from_rpc_error(refused.value).reason == "UNSUPPORTED"
        assert not (await ask(1, 0)).checkpoint_asked
        assert await save() == PolicyVersion(1, 0)  # there is one of all that was trained
        for group in await world.acquire(1):
            await world.report(world.finished(group))
        await world.train((await ask(1, 0)).plan)
        waiting = asyncio.create_task(save())
        await asyncio.wait_for(asked(), 60)
        assert not waiting.done()
        assert not (await ask(2, 1)).checkpoint_asked
        assert await waiting == PolicyVersion(1, 1)
