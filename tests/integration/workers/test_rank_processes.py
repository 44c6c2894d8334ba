"""Ranks as processes: one that is killed takes nothing from the others, and comes back to what they serve."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.errors import from_rpc_error
from slipstream.common.version import PolicyVersion
from slipstream.engine.embedded.config import EmbeddedConfig
from tests.integration.workers.processes import WorkerProcess, begin, start_group, states, until, update

pytestmark = pytest.mark.timeout(180)

V1, V2, V3, V4 = (PolicyVersion(1, step) for step in (1, 2, 3, 4))
SERVING = worker_pb2.WORKER_STATE_SERVING
ENGINE = EmbeddedConfig(block_size_tokens=4, block_count=1024, max_running_samples=16)


@pytest.fixture
async def ranks(empty_cluster, valkey_url):
    """Two ranks that serve version 1.1."""
    await empty_cluster.publish(V1)
    ranks = await start_group(empty_cluster, 2, valkey_url, engine=ENGINE)
    yield ranks
    for rank in ranks:
        await rank.stop()


async def restart(rank: WorkerProcess) -> None:
    await rank.ended(30)
    await rank.channel.close()
    rank.start()
    await rank.up()


async def test_killed_ranks_come_back_to_what_their_group_serves(empty_cluster, ranks):
    await until(ranks, [(V1, SERVING)] * 2)
    await empty_cluster.publish(V2)
    await update(ranks[0], V2)
    assert await states(ranks) == [(V2, SERVING)] * 2
    for killed in reversed(ranks):  # the leader last
        killed.signal(signal.SIGKILL)
        await restart(killed)
        await until(ranks, [(V2, SERVING)] * 2)
    # The leader is killed while the other rank stands still in the middle of an update.
    await empty_cluster.publish(V3)
    await ranks[0].control.BeginUpdate(begin(V3, "cut"), timeout=30)
    ranks[1].stand_still()
    call = asyncio.ensure_future(ranks[0].control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id="cut")))
    await asyncio.sleep(0.5)
    ranks[0].signal(signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert from_rpc_error(refused.value).reason in ("UNREACHABLE", "CANCELLED")
    ranks[1].signal(signal.SIGCONT)
    await restart(ranks[0])
    # Whether or not the rank heard of the update before it lost its leader, it never has version 1.3 alone.
    await until(ranks, [(V2, SERVING)] * 2)
    await update(ranks[0], V3)
    assert await states(ranks) == [(V3, SERVING)] * 2
    # A rank is killed in the middle of one.
    await empty_cluster.publish(V4)
    await ranks[0].control.BeginUpdate(begin(V4, "cut again"), timeout=30)
    ranks[1].stand_still()
    call = asyncio.ensure_future(ranks[0].control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id="cut again")))
    await asyncio.sleep(0.5)
    ranks[1].signal(signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert from_rpc_error(refused.value).reason == "UNREACHABLE"
    assert await states(ranks) == [(V3, SERVING), None]
    await restart(ranks[1])
    await until(ranks, [(V3, SERVING)] * 2)
    await update(ranks[0], V4)
    assert await states(ranks) == [(V4, SERVING)] * 2
