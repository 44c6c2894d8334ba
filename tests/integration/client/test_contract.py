"""The client against a whole orchestrator, and its fake against the same expectations."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.api.run.v1 import run_pb2
from slipstream_client import (
    AsyncClient,
    DeadlineExceeded,
    EnvironmentUnknown,
    InvalidRequest,
    RequestIdReused,
    RolloutQueueFull,
    RolloutState,
    RolloutUnknown,
    RunEnded,
)
from slipstream_client.fake import FakeServer, Script

DEADLINE_S = 60.0
"""By then a thing has happened that is going to happen, on any machine."""


@asynccontextmanager
async def real_client(make_world: Any, **fields: Any):
    """A world that serves version 1.0, and a client of it."""
    async with make_world(**fields) as world:
        world.publish(0)
        await world.until(lambda run: run.HasField("serving"))
        async with AsyncClient.connect(world.address, timeout_s=DEADLINE_S) as client:
            yield world, client


@pytest.fixture(params=["orchestrator", "fake"])
async def client(request: pytest.FixtureRequest, make_world: Any, background: Any):
    if request.param == "fake":
        with FakeServer() as server:
            server.script(Script(texts=["a", "b"], rewards=[0.0, 1.0]), environment="words")
            async with AsyncClient.connect(server.address, timeout_s=DEADLINE_S) as client:
                yield client
    else:
        async with (
            real_client(make_world) as (world, client),
            background(world.runner_loop(filtered_every=10**9), world.heartbeat_loop()),
        ):
            yield client


async def test_a_group_goes_from_creation_to_its_end_as_the_contract_says(client: AsyncClient):
    created = await client.create_rollout(environment="words", split="held_out", sample_count=2, labels={"who": "me"})
    other = await client.create_rollout(prompt="hello")
    ended = await client.wait_rollout(created.group_id, timeout_s=DEADLINE_S)
    assert (ended.state, ended.labels, ended.environment) == (RolloutState.FINISHED, {"who": "me"}, "words")
    assert ended.sequence > created.sequence
    assert str(ended.dispatch_version) == "1.0"
    assert [(sample.index, sample.reward, sample.correct) for sample in ended.samples] == [
        (0, 0.0, False),
        (1, 1.0, True),
    ]
    assert all(str(span.version) == "1.0" for sample in ended.samples for span in sample.versions)
    assert await client.cancel_rollout(created.group_id) == ended, "what has ended stays as it is"
    await client.wait_rollout(other.group_id, timeout_s=DEADLINE_S)
    assert [rollout.group_id async for rollout in client.list_rollouts(page_size=1)] == [
        created.group_id,
        other.group_id,
    ]
    assert [rollout.group_id async for rollout in client.list_rollouts(labels={"who": "me"})] == [created.group_id]
    assert (await client.get_rollout(created.group_id)) == ended
    with pytest.raises(DeadlineExceeded, match=r"0\.3 s have passed"):
        await anext(client.watch_rollouts(ended.sequence, labels={"who": "me"}, timeout_s=0.3))


async def test_refusals_name_what_is_wrong(client: AsyncClient):
    with pytest.raises(EnvironmentUnknown) as unknown:
        await client.create_rollout(environment="wrods")
    assert "words" in unknown.value.metadata["known"]
    with pytest.raises(InvalidRequest) as invalid:
        await client.create_rollout(prompt="x", sample_count=65)
    assert invalid.value.metadata["field"] == "sample_count"
    assert "less than or equal to 64" in invalid.value.metadata["limit"]
    assert str(invalid.value).startswith("sample_count: must be")
    with pytest.raises(InvalidRequest) as beyond:
        await anext(client.watch_rollouts(1_000_000))
    assert beyond.value.metadata["field"] == "after_sequence"
    for call in (client.get_rollout, client.cancel_rollout, client.wait_rollout):
        with pytest.raises(RolloutUnknown, match="'nobody' is not known"):
            await call("nobody", timeout_s=DEADLINE_S)
    first = await client.create_rollout(prompt="x", request_id="mine")
    assert (await client.create_rollout(prompt="x", request_id="mine")).group_id == first.group_id
    with pytest.raises(RequestIdReused):
        await client.create_rollout(prompt="y", request_id="mine")
    with pytest.raises(ValueError, match="an environment, whose task is run, or a prompt"):
        await client.create_rollout()


async def test_a_group_is_cancelled_in_every_state(make_world: Any):
    async with real_client(make_world) as (world, client):
        running = await client.create_rollout(prompt="x")
        (group,) = await world.acquire(count=1)
        queued = await client.create_rollout(prompt="y")
        states = [(await client.get_rollout(one.group_id)).state for one in (running, queued)]
        assert states == [RolloutState.RUNNING, RolloutState.QUEUED]
        for one in (running, queued, running, queued):  # the second time they are cancelled already
            cancelled = await client.cancel_rollout(one.group_id)
            assert (cancelled.state, cancelled.reason, cancelled.samples) == (RolloutState.CANCELLED, "CLIENT", ())
        assert [c.group.group_id for c in (await world.heartbeat()).cancellations] == [running.group_id]
        late = await world.report(world.finished(group))
        assert [attempt.group_id for attempt in late.refused] == [running.group_id]
        assert (await client.get_rollout(running.group_id)).state is RolloutState.CANCELLED

        failing = await client.create_rollout(environment="words")
        (group,) = [one for one in await world.acquire() if one.group_id == failing.group_id]
        await world.report(world.failed(group))
        failed = await client.cancel_rollout(failing.group_id)
        assert (failed.state, failed.reason, failed.detail) == (
            RolloutState.FAILED,
            "ENVIRONMENT_ERROR",
            "division by zero",
        )


async def test_failures_of_third_parties_do_not_end_the_run(make_world: Any):
    async with real_client(make_world, failing_environment_timeout_s=0.2) as (world, client):
        for _ in range(4):
            failing = await client.create_rollout(environment="words")
            groups = await world.acquire(count=1)
            assert [group.group_id for group in groups] == [failing.group_id]
            await world.report(world.failed(groups[0]))
        await asyncio.sleep(1.2)
        assert not (await client.get_run()).ended


async def test_rows_of_a_third_party_are_dropped_and_the_answer_is_kept(make_world: Any):
    async with real_client(make_world) as (world, client):
        created = await client.create_rollout(environment="words", include_tokens=True)
        (group,) = await world.acquire(count=1)
        assert group.include_tokens
        report = world.finished(group)
        report.prompt = "spell"
        report.rollouts[0].answer.text = "olleh"
        report.rollouts[0].answer.token_ids.extend([3, 1, 4])
        taken = await world.report(report)
        assert [attempt.group_id for attempt in taken.unneeded] == [created.group_id]
        ended = await client.get_rollout(created.group_id)
        assert ended.prompt == "spell"
        assert [(sample.text, sample.token_ids) for sample in ended.samples] == [("olleh", (3, 1, 4))]


async def test_clients_beside_each_other_see_their_own_groups_and_share_the_bound(make_world: Any, background: Any):
    async with (
        real_client(make_world, max_external_rollouts=8) as (world, first),
        AsyncClient.connect(world.address) as second,
    ):
        for client, name in ((first, "first"), (second, "second")):
            for _ in range(4):
                await client.create_rollout(prompt=name, labels={"who": name})
        with pytest.raises(RolloutQueueFull) as full:
            await second.create_rollout(prompt="one more")
        assert full.value.metadata["limit"] == "8"
        async with background(world.runner_loop(), world.heartbeat_loop()):
            seen = await asyncio.gather(ended_of(first, "first"), ended_of(second, "second"))
        assert [len(groups) for groups in seen] == [4, 4]
        assert not seen[0] & seen[1]


async def ended_of(client: AsyncClient, name: str) -> set[str]:
    ended: set[str] = set()
    async with aclosing(client.watch_rollouts(labels={"who": name}, timeout_s=DEADLINE_S)) as changes:
        async for rollout in changes:
            if rollout.ended:
                ended.add(rollout.group_id)
            if len(ended) == 4:
                break
    return ended


async def test_a_watcher_that_does_not_read_holds_up_nobody(make_world: Any, background: Any):
    heavy = {f"label-{number}": "x" * 256 for number in range(16)}
    async with real_client(make_world) as (world, client), background(world.runner_loop(), world.heartbeat_loop()):
        silent = world.rollouts.WatchRollouts(rollout_pb2.WatchRolloutsRequest(), timeout=60)
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(10):  # 4 KB a change: far more than the connection buffers
                groups = [await client.create_rollout(prompt="x", labels=heavy) for _ in range(20)]
                assert (await client.wait_rollout(groups[-1].group_id)).state is RolloutState.FINISHED
        silent.cancel()


async def test_a_watch_ends_with_the_run_and_creation_is_refused(make_world: Any):
    async with real_client(make_world) as (world, client):
        created = await client.create_rollout(prompt="x")
        watch = asyncio.create_task(collect(client))
        await asyncio.sleep(0.1)
        await world.runs.StopRun(run_pb2.StopRunRequest(request_id="stop", reason="enough"))
        changes = await asyncio.wait_for(watch, DEADLINE_S)
        assert (changes[-1].group_id, changes[-1].state) == (created.group_id, RolloutState.CANCELLED)
        with pytest.raises(RunEnded, match=r"the run has ended \(enough\); it takes no more rollouts"):
            await client.create_rollout(prompt="x")
        assert [run.state async for run in client.watch_run(timeout_s=DEADLINE_S)][-1] == "stopped"


async def collect(client: AsyncClient) -> list[Any]:
    return [rollout async for rollout in client.watch_rollouts(timeout_s=DEADLINE_S)]
