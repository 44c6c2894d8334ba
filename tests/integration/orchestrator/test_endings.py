"""Every way in which a run can no longer go on ends it within its deadline, with one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.run.v1 import run_pb2
from slipstream.orchestrator.config import BreakerConfig, SessionsConfig
from slipstream.orchestrator.evaluation_config import EvaluationConfig

Make = Callable[..., Any]
QUICK = BreakerConfig(open_after_failures=2, first_pause_s=0.1, max_pause_s=0.2)


def failed(world: Any) -> Callable[[run_pb2.Run], bool]:
    return lambda run: run.state == run_pb2.RUN_STATE_FAILED


async def test_without_a_first_version(make_world: Make) -> None:
    async with make_world(start_timeout_s=0.5) as world:
        run = await world.until(failed(world))
        assert run.reason == "no version was served after 0 s; published: no version"


async def test_without_a_runner(make_world: Make) -> None:
    async with make_world(pool_timeout_s=2.0) as world:
        world.publish(0)
        run = await world.until(failed(world))
        assert run.reason == "no runner reported for 2 s"
        assert (await world.plan(1)).ended.reason == run.reason


async def test_a_trainer_that_trains_no_more(make_world: Make, background: Make) -> None:
    async with make_world(stall_timeout_s=4.0, total_steps=9) as world:
        world.publish(0)
        async with background(world.runner_loop(), world.heartbeat_loop()):
            await world.train((await world.plan(1)).plan)
            run = await world.until(failed(world))
        assert run.reason.startswith("nothing was trained or answered for 4 s in phase training")


async def test_a_run_of_sessions_alone_waits_for_the_next_agent(make_world: Make, background: Make) -> None:
    async with make_world(stall_timeout_s=0.3, sessions=SessionsConfig(only=True)) as world:
        world.publish(0)
        async with background(world.heartbeat_loop()):
            await world.until(lambda run: run.phase == "training")
            await asyncio.sleep(1.2)
            assert not world.orchestrator.state.ended, world.orchestrator.state.reason


async def test_an_evaluation_after_the_last_step_that_nobody_answers(make_world: Make, background: Make) -> None:
    async with make_world(stall_timeout_s=4.0, evaluate_after=True, total_steps=1) as world:
        async with background(world.trainer_loop(), world.heartbeat_loop()):
            groups: list[Any] = []
            while not groups:
                groups = await world.acquire(count=4)
            await world.report(*(world.finished(group) for group in groups))
            run = await world.until(failed(world))
        assert run.step == 1
        assert run.reason == "nothing was trained or answered for 4 s in phase evaluating_after"


async def test_an_evaluation_after_the_last_step_that_takes_too_long_ends_the_run_with_what_is_known(
    make_world: Make, background: Make
) -> None:
    evaluation = EvaluationConfig(timeout_s=1.0)
    async with make_world(evaluation=evaluation, evaluate_after=True, total_steps=1, stall_timeout_s=600.0) as world:
        async with background(world.trainer_loop(), world.heartbeat_loop()):
            groups: list[Any] = []
            while not groups:
                groups = await world.acquire(count=4)
            await world.report(*(world.finished(group) for group in groups))
            run = await world.until(lambda run: run.state == run_pb2.RUN_STATE_FINISHED)
        assert run.reason == "all 1 steps are trained"
        assert not run.accuracies, "nobody answered anything"


async def test_an_evaluation_after_the_last_step_whose_environment_only_fails(
    make_world: Make, background: Make
) -> None:
    async with make_world(
        failing_environment_timeout_s=1.5, evaluate_after=True, total_steps=1, breaker=QUICK
    ) as world:

        async def runner() -> None:
            while True:
                groups = await world.acquire(count=4)
                held_out = runner_pb2.GROUP_PURPOSE_EVALUATION
                reports = [(world.failed if g.purpose == held_out else world.finished)(g) for g in groups]
                if reports:
                    await world.report(*reports)

        async with background(world.trainer_loop(), world.heartbeat_loop(), runner()):
            run = await world.until(failed(world))
        assert "failed in a row" in run.reason
        assert "division by zero" in run.reason


async def test_a_sandbox_that_stays_away_pauses_the_run_and_then_ends_it(make_world: Make, background: Make) -> None:
    async with make_world(failing_environment_timeout_s=6.0, breaker=QUICK) as world:
        seen: list[str] = []

        async def runner() -> None:
            world.publish(0)
            while True:
                reports = [world.failed(group) for group in await world.acquire(count=4)]
                for report in reports:
                    report.reason, report.detail = "SANDBOX_AWAY", "nobody listens"
                if reports:
                    await world.report(*reports)

        def paused(run: run_pb2.Run) -> bool:
            seen.extend(run.warnings)
            return run.state == run_pb2.RUN_STATE_PAUSED

        async with background(world.heartbeat_loop(), runner()):
            run = await world.until(paused)
            assert run.reason.startswith("every environment is backed off, the last as environment ")
            run = await world.until(failed(world))
        assert "failed in a row" in run.reason
        assert run.reason.endswith("the last with: nobody listens; traceback in logs/runner-1.log")
        assert any("is backed off and tried now and then: nobody listens" in sentence for sentence in seen)
        assert world.metrics("group_failed") == [], "none of them is to blame"


async def test_a_finished_run_tells_runners_to_stop_what_it_needs_no_more(make_world: Make, background: Make) -> None:
    async with make_world(total_steps=1, over_sampling=2.0, max_off_policy_steps=0) as world:
        world.publish(0)
        await world.until(lambda run: run.serving.incarnation == 1)
        groups = await world.acquire(count=8)
        await world.report(*(world.finished(group) for group in groups[:4]))
        async with background(world.heartbeat_loop(), world.trainer_loop()):
            run = await world.until(lambda run: run.phase == "ended")
            left = {group.group_id for group in groups[4:]}
            await world.until(lambda _: {name for name, _ in world.cancelled} == left)
        assert run.state == run_pb2.RUN_STATE_FINISHED
        assert {reason for _, reason in world.cancelled} == {"RUN_COMPLETE"}


@pytest.mark.parametrize(("given", "longest"), [(None, 1800.0), (30.0, 30.0)])
def test_a_run_does_not_stall_while_a_group_has_time_left(make_config: Make, given: Any, longest: float) -> None:
    from slipstream.orchestrator.config import EnvironmentConfig, OrchestratorConfig, WorkerConfig

    config = make_config(
        OrchestratorConfig,
        workers=[WorkerConfig(replica="decode-1", role="decode", address="nowhere:1")],
        broadcaster="nowhere:2",
        environments=[
            EnvironmentConfig(name="slow", deadline_s=900.0),
            EnvironmentConfig(name="quick", deadline_s=9.0),
        ],
        stall_timeout_s=given,
    )
    assert config.longest_stall_s == longest
