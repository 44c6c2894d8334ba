"""A router among workers that come, go, restart and fall silent, and a Valkey that dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from redis import asyncio as redis
from structlog.testing import capture_logs

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.routing.v1 import routing_pb2
from slipstream.common.auth import Access
from slipstream.common.errors import from_rpc_error
from slipstream.common.version import PolicyVersion
from slipstream.router import servicer
from slipstream.runner.peers import Peers

from .conftest import DEADLINE_S

NOWHERE = "127.0.0.1:1"


async def test_a_placement_counts_and_is_mirrored_until_it_is_released(world: Any) -> None:
    placed = await world.place(sample_count=8)
    assert placed.lease_ttl_ms == 60_000
    held = json.loads(await world.mirrored(placed.placement_id))
    assert (held["prefill"], held["decode"]) == (placed.prefill.replica, placed.decode.replica)
    assert (held["decode_epoch"], held["sample_count"]) == ("first", 8)
    workers = await world.list()
    assert [workers[ref.replica].placement_count for ref in (placed.prefill, placed.decode)] == [1, 1]
    assert (await world.place()).decode.replica != placed.decode.replica  # the other one is idle

    assert await world.release(placed.placement_id, "unknown") == 1
    assert await world.release(placed.placement_id) == 0
    await world.mirrored(placed.placement_id, there=False)
    assert (await world.list())[placed.decode.replica].placement_count == 0


async def test_a_runner_that_starts_ends_what_its_dead_process_held(world: Any) -> None:
    """A worker would count as full for a minute, with nothing to do, by the turns of a runner that was killed."""
    held = [await world.place(sample_count=8, runner_id="runner-1", runner_epoch="1") for _ in range(2)]
    other = await world.place(sample_count=8, runner_id="runner-2", runner_epoch="1")
    peers = Peers(NOWHERE, world.address, Access(), "runner-1", "2")
    try:
        assert await peers.end_earlier_placements()
    finally:
        await peers.close()
    assert sum(worker.placement_count for worker in (await world.list()).values()) == 2
    assert await world.release(*(placed.placement_id for placed in (*held, other))) == 1
    for placed in held:
        await world.mirrored(placed.placement_id, there=False)


async def test_a_runner_that_starts_ends_what_its_dead_process_held_at_other_routers(start_world: Any) -> None:
    told, other = [await start_world() for _ in range(2)]
    await other.place(runner_id="runner-1", runner_epoch="1")
    kept = [
        await other.place(runner_id="runner-2", runner_epoch="1"),
        await other.place(runner_id="runner-1", runner_epoch="2"),
    ]
    peers = Peers(NOWHERE, told.address, Access(), "runner-1", "2")
    try:
        assert await peers.end_earlier_placements()
    finally:
        await peers.close()
    await other.until(lambda workers: sum(worker.placement_count for worker in workers.values()) == 4)
    assert await other.release(*(placed.placement_id for placed in kept)) == 2


async def test_a_placement_whose_runner_waits_for_it_no_longer_is_released(world: Any) -> None:
    """Its group was cancelled. Its workers would count as busier than they are until the lease ends, a minute later."""
    peers = Peers(NOWHERE, world.address, Access(), "runner-1", "1")
    try:
        for number in range(20):
            request = world.request(request_id=f"cancelled-{number}", sample_count=1)
            placing = asyncio.create_task(peers.place(request, DEADLINE_S))
            await asyncio.sleep(number * 0.0002)
            placing.cancel()
            await asyncio.wait([placing])
            if not placing.cancelled():
                peers.release_placement(placing.result().placement_id)
        async with asyncio.timeout(DEADLINE_S):
            while sum(worker.placement_count for worker in (await world.list()).values()):
                await peers.give_back()
    finally:
        await peers.close()


async def test_a_repeated_request_answers_the_same_placement(world: Any) -> None:
    first, second = [await world.place(request_id="same") for _ in range(2)]
    assert first == second
    assert sum(worker.placement_count for worker in (await world.list()).values()) == 2
    assert await world.refused(request_id="same", sample_count=9) == "REQUEST_ID_REUSED"


async def test_an_expired_lease_frees_what_it_counted(start_world: Any) -> None:
    world = await start_world(lease_ttl_s=0.5)
    placed = await world.place()
    await world.until(lambda workers: all(worker.placement_count == 0 for worker in workers.values()))
    await world.mirrored(placed.placement_id, there=False)
    assert await world.release(placed.placement_id) == 0


async def test_a_turn_goes_where_its_prefix_is_cached(world: Any) -> None:
    world.workers["prefill-2"].stores(7, 8)
    world.workers["decode-1"].stores(7)
    await world.heard()
    for _ in range(3):
        placed = await world.place(7, 8, 9)
        assert (placed.prefill.replica, placed.decode.replica) == ("prefill-2", "decode-1")
        assert placed.expected_cached_token_count == 2 * 4


async def test_a_prompt_that_the_decode_worker_mostly_has_goes_to_no_prefill_worker(start_world: Any) -> None:
    world = await start_world(remote_prefill_min_uncached_tokens=4)
    cold = await world.place(7, 8)
    assert cold.HasField("prefill")
    assert await world.release(cold.placement_id) == 1
    world.workers["decode-1"].stores(7, 8)
    await world.heard()
    warm = await world.place(7, 8)  # 11 tokens: of the 10 that have KV, 8 are there
    assert not warm.HasField("prefill")
    assert (warm.decode.replica, warm.expected_cached_token_count) == ("decode-1", 8)
    assert json.loads(await world.mirrored(warm.placement_id))["prefill"] == ""
    workers = await world.list()
    assert [workers[name].placement_count for name in ("prefill-1", "prefill-2", "decode-1")] == [0, 0, 1]
    assert await world.release(warm.placement_id) == 1


async def test_a_router_without_a_prefill_pool_places_on_decode_workers_alone(start_world: Any) -> None:
    world = await start_world(pools=("decode",))
    placed = await world.place(7, 8)
    assert (placed.HasField("prefill"), placed.decode.replica) == (False, "decode-1")


async def test_a_restarted_worker_has_a_new_epoch_and_no_cached_prefix(world: Any) -> None:
    prefill = world.workers["prefill-2"]
    prefill.stores(7, 8)
    await world.heard()
    assert (await world.place(7, 8)).expected_cached_token_count == 8
    await prefill.stop()
    await world.until(lambda workers: not workers["prefill-2"].routable)
    prefill.epoch = "second"
    await prefill.start(world.make_config)
    await world.until(lambda workers: workers["prefill-2"].routable)
    placed = await world.place(7, 8, avoid_replicas=["prefill-1"])
    assert (placed.prefill.epoch, placed.expected_cached_token_count) == ("second", 0)


async def test_a_worker_whose_stream_breaks_is_out_at_once(start_world: Any) -> None:
    world = await start_world(worker_silence_s=5.0)
    with capture_logs() as lines:
        await world.workers["decode-1"].stop()
        await world.until(lambda workers: not workers["decode-1"].routable)
    said = [line["event"] for line in lines if line.get("replica") == "decode-1"]
    assert "worker_lost" in said
    assert "worker_silent" not in said, "that is not waited for"
    for _ in range(3):
        assert (await world.place()).decode.replica == "decode-2"
    await world.workers["decode-2"].stop()
    await world.until(lambda workers: not workers["decode-2"].routable)
    assert await world.refused() == "NO_WORKER"


async def test_a_silent_worker_is_out_until_it_is_heard_of(world: Any) -> None:
    world.workers["prefill-1"].silent = True
    await world.until(lambda workers: not workers["prefill-1"].routable)
    assert (await world.place()).prefill.replica == "prefill-2"
    world.workers["prefill-1"].silent = False
    await world.until(lambda workers: workers["prefill-1"].routable)


async def test_a_worker_below_the_version_or_stale_is_never_offered(world: Any) -> None:
    world.workers["decode-1"].version = PolicyVersion(1, 4)
    world.workers["prefill-2"].version = PolicyVersion(2, 0)
    world.workers["prefill-1"].state = worker_pb2.WORKER_STATE_STALE
    await world.heard()
    for _ in range(3):
        placed = await world.place(step=4)
        assert (placed.prefill.replica, placed.decode.replica) == ("prefill-2", "decode-1")
    assert await world.refused(step=5) == "NO_WORKER"


async def test_without_valkey_nothing_is_placed_and_open_placements_are_written_again(
    world: Any, own_valkey: Any
) -> None:
    kept, released = await world.place(), await world.place()
    await world.mirrored(kept.placement_id)
    own_valkey.kill()
    await world.until_refused("STATE_UNAVAILABLE")
    assert await world.release(released.placement_id) == 1  # what is open goes on

    own_valkey.start()  # an empty one
    await world.placeable()
    assert json.loads(await world.mirrored(kept.placement_id))["decode"] == kept.decode.replica
    await world.mirrored(released.placement_id, there=False)


async def test_more_placements_than_may_be_open_are_refused_with_the_setting_until_one_ends(start_world: Any) -> None:
    world = await start_world(max_placements=3, affinity_slack_samples=0)
    held = [await world.place(sample_count=1) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.place(sample_count=1)
        error = from_rpc_error(caught.value)
        assert (error.reason, error.metadata["name"], error.metadata["limit"]) == (
            "POOL_SATURATED",
            "router.max_placements",
            "3",
        )
    assert sum(worker.placement_count for worker in (await world.list()).values()) == 6  # of both pools
    assert await world.release(held[0].placement_id) == 1
    await world.place(sample_count=1)


async def test_while_valkey_is_full_nothing_is_placed_and_the_log_says_so_once(world: Any, own_valkey: Any) -> None:
    kept, released = await world.place(), await world.place()
    await world.mirrored(kept.placement_id)
    server = redis.Redis.from_url(own_valkey.url)
    with capture_logs() as logs:
        await server.config_set("maxmemory", 1)
        async with asyncio.timeout(DEADLINE_S):
            while not any(entry["event"] == "redis_away" for entry in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for _ in range(20):
            assert await world.refused() == "STATE_UNAVAILABLE"
            await asyncio.sleep(0.05)
        assert await world.release(released.placement_id) == 1
        await asyncio.sleep(0.5)  # a full server takes that, and still nothing else
        assert await world.refused() == "STATE_UNAVAILABLE"
        await server.config_set("maxmemory", 0)
        await world.placeable()
    await server.aclose()
    await world.mirrored(released.placement_id, there=False)
    assert json.loads(await world.mirrored(kept.placement_id))["decode"] == kept.decode.replica
    told = [entry for entry in logs if entry["event"] in ("redis_away", "redis_back")]
    assert [entry["event"] for entry in told] == ["redis_away", "redis_back"]
    assert "maxmemory" in told[0]["detail"]


async def test_workers_are_listed_in_pages(world: Any) -> None:
    names, token = [], ""
    while True:
        page = await world.router.ListWorkers(routing_pb2.ListWorkersRequest(page_size=3, page_token=token))
        names.append([worker.ref.replica for worker in page.workers])
        token = page.next_page_token
        if not token:
            break
    assert names == [["decode-1", "decode-2", "prefill-1"], ["prefill-2"]]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.router.ListWorkers(routing_pb2.ListWorkersRequest(page_token="never-given"))
    assert from_rpc_error(caught.value).reason == "INVALID_REQUEST"


async def test_a_watcher_hears_of_every_change_soon(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "WATCH_KEEPALIVE_S", 3600.0)
    stream = world.router.WatchWorkers(routing_pb2.WatchWorkersRequest())
    first = await stream.read()
    assert [worker.version.step for worker in first.workers] == [3, 3, 3, 3]
    # Right behind a message, when the stream pauses to keep to ten a second.
    for worker in world.workers.values():
        worker.version = PolicyVersion(1, 4)
    async with asyncio.timeout(DEADLINE_S):
        while {worker.version.step for worker in (await stream.read()).workers} != {4}:
            pass
    stream.cancel()
