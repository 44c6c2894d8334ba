"""A data-parallel vLLM engine on the CPU, its experts spread over two ranks, each a worker process."""

from __future__ import annotations

import asyncio
import signal

import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.version import PolicyVersion
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.installed import find_vllm
from slipstream.engine.vllm.parallel import ParallelConfig
from tests.integration.workers.conftest import Cluster
from tests.integration.workers.kinds import Vllm
from tests.integration.workers.processes import start_group, states, update

pytestmark = pytest.mark.timeout(300)

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
SERVING = worker_pb2.WORKER_STATE_SERVING
ENGINE = VllmConfig(
    block_count=64,
    max_running_samples=16,
    max_prefill_tokens=64,
    parallel=ParallelConfig(data_parallel_size=2, expert_parallel=True),
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture
async def cluster(make_config, tmp_path):
    find_vllm()
    cluster = Cluster(make_config, tmp_path, Vllm())
    await cluster.start()
    yield cluster
    await cluster.stop()


async def greedy(cluster: Cluster, rank, request_id: str, salt: str, count: int = 8) -> list[int]:
    request = cluster.decode_request(
        rank, None, request_id, salt=salt, sampling={"temperature": 0.0, "max_new_tokens": count}
    )
    (sample,) = await cluster.samples(rank, request)
    return list(sample.token_ids)


async def running_samples(ranks) -> list[int]:
    return [(await rank.describe()).load.running_sample_count for rank in ranks]


async def test_ranks_of_one_engine_step_swap_and_end_together(cluster, valkey_url):
    await cluster.publish(V1)
    ranks = await start_group(cluster, 2, valkey_url, engine=ENGINE)
    try:
        assert await states(ranks) == [(PolicyVersion(0, 0), worker_pb2.WORKER_STATE_STARTING)] * 2
        await update(ranks[0], V1)  # as the keeper does at start: no rank can load weights alone
        assert await states(ranks) == [(V1, SERVING)] * 2
        # One rank has requests; the other steps with it, as half of the experts are there.
        for number, rank in enumerate(ranks):
            assert await greedy(cluster, rank, f"g{number}.0", "run/1.1") == cluster.greedy(V1, PROMPT, 8)
        long = {"max_new_tokens": 220, "temperature": 1.0}
        await cluster.publish(V2)
        running = [
            asyncio.create_task(
                cluster.samples(rank, cluster.decode_request(rank, None, f"l{number}.0", sampling=long))
            )
            for number, rank in enumerate(ranks)
        ]
        async with asyncio.timeout(30):
            while 0 in await running_samples(ranks):  # noqa: ASYNC110 another process
                await asyncio.sleep(0.01)
        applied = await update(ranks[0], V2)
        assert applied.in_flight_sample_count == 2
        assert applied.probe_max_abs_error < 1e-3
        for task in running:
            (sample,) = await task
            assert {PolicyVersion.from_proto(span.version) for span in sample.spans if span.token_count} == {V1, V2}
            assert len(sample.token_ids) == 220
        assert await states(ranks) == [(V2, SERVING)] * 2
        for number, rank in enumerate(ranks):
            assert await greedy(cluster, rank, f"h{number}.0", "run/1.2") == cluster.greedy(V2, PROMPT, 8)
        # Weights whose probe fails are put back by both, and both go on.
        await cluster.publish(V3, probe_error=1.0)
        with pytest.raises(Exception, match="probe"):
            await update(ranks[0], V3)
        assert [state and state[0] for state in await states(ranks)] == [V2, V2]
        ranks[1].signal(signal.SIGKILL)
        await ranks[1].ended(30)
        assert await ranks[0].ended(60) != 0
    finally:
        await asyncio.gather(*(rank.stop() for rank in ranks))
