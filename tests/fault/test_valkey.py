"""Valkey dies while a run trains: admission pauses, an empty server is filled again, and no group is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from redis import asyncio as redis
from run_process import gated_after, terminal_outcomes

from slipstream.common.state import PUBLISHED, SERVING, State
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.redis_mirror import RedisMirror
from slipstream.orchestrator.run_state import RunState

pytestmark = pytest.mark.timeout(540, func_only=False)


def run_states(run) -> list[str]:
    return [record["state"] for record in run.metrics("run")]


async def test_a_run_goes_on_over_the_death_of_valkey_and_loses_no_group(launch, tmp_path):
    gate = tmp_path / "gate"
    run = launch("run", "--orchestrator.total-steps", "25", options=gated_after(23, gate))
    run.wait_step(3)
    killed = run.pid("valkey")
    os.kill(killed, signal.SIGKILL)
    run.wait_until(lambda: run_states(run) == ["paused", "running"])
    assert run.pid("valkey") != killed
    assert [event["reason"] for event in run.events("service_died")] == ["killed by SIGKILL"]

    state = State(run.setting("orchestrator", "redis", "url"), "run")
    try:
        serving = await state.version(SERVING)  # first: both go on
        published = await state.version(PUBLISHED)
        assert UNSET < serving <= published
        assert serving.step >= 1
        assert any(key.startswith("runner/") for key in await state.leases())
    finally:
        await state.close()

    gate.touch()
    assert run.end() == 0, run.output
    assert run_states(run) == ["paused", "running", "finished"]
    assert terminal_outcomes(run.journal()) == {1}
    assert run.left_after() == []


async def test_a_server_that_came_back_empty_between_two_writes_is_filled_again(own_valkey, tmp_path):
    version = PolicyVersion(1, 7)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", time.time)
    run_state = RunState("run", 10, metrics)
    run_state.published = run_state.serving = version
    state = State(own_valkey.url, "run")
    leases = RunnerLeases(10.0, time.monotonic)
    mirror = RedisMirror(state, run_state, leases, asyncio.Event(), lambda: {"train-1": "1.7"}, lambda: None)
    loop = asyncio.create_task(mirror.run())
    try:
        await written(own_valkey.url, version)
        own_valkey.kill()  # and back before anything is written: no call fails
        own_valkey.start()
        await written(own_valkey.url, version)
    finally:
        loop.cancel()
        await state.close()
        metrics.close()


async def test_a_full_server_closes_admission_with_a_sentence_that_names_its_limit(own_valkey, tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", time.time)
    run_state = RunState("run", 10, metrics)
    run_state.published = run_state.serving = version = PolicyVersion(1, 7)
    state, server = State(own_valkey.url, "run"), redis.Redis.from_url(own_valkey.url)
    leases = RunnerLeases(10.0, time.monotonic)
    leases.renew("runner-1", "1")
    mirror = RedisMirror(state, run_state, leases, asyncio.Event(), lambda: {"train-1": "1.7"}, lambda: None)
    loop = asyncio.create_task(mirror.run())
    try:
        await written(own_valkey.url, version)
        await server.config_set("maxmemory", 1)
        async with asyncio.timeout(60):
            while not run_state.pauses:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert run_state.pauses["redis"].startswith("admission waits: Redis is full, its maxmemory is reached")
        await asyncio.sleep(0.6)  # it does not open between two tries
        assert run_state.pauses
        await server.config_set("maxmemory", 0)
        async with asyncio.timeout(60):
            while run_state.pauses:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        loop.cancel()
        await state.close()
        await server.aclose()
        metrics.close()


async def written(url: str, version: PolicyVersion) -> None:
    reader = State(url, "run")
    try:
        async with asyncio.timeout(60):
            while await reader.version(SERVING) != version or await reader.get("dispatch_versions") is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        await reader.close()
