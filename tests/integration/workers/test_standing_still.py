"""Workers that stand still, as under a debugger, and those whose engine alone does: their turns go to others."""

from __future__ import annotations

import asyncio
import signal
import threading

import numpy as np
import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.config import WorkerEndpoint
from slipstream.common.version import PolicyVersion
from slipstream.engine.embedded.config import EmbeddedConfig
from tests.integration.workers.processes import start_prefiller
from tests.integration.workers.test_turns import prompt_rows, tokens

pytestmark = pytest.mark.timeout(240)

V1 = PolicyVersion(1, 1)
SILENCE_S = 1.5
"""Of an engine, in ticks of its process."""
WORKER_SILENCE_S = 5.0
"""By the clock: a process that the machine is too busy for is not taken for one that stands still."""
DEADLINE_S = 30.0
"""Of turns, and of a prefill's call: where nobody noticed the silence, what was asked ends here, and fails."""
GROUPS = 6


async def test_turns_of_a_prefill_worker_that_stands_still_end_within_the_bound_of_its_silence(
    cluster, start_turns, valkey_url
):
    prompts = np.random.default_rng(9).integers(0, 23, (3 * GROUPS, 100)).tolist()
    engine = EmbeddedConfig(block_size_tokens=4, block_count=1024)
    stopped = await start_prefiller(cluster, "prefill-2", valkey_url, engine=engine)
    try:
        endpoint = WorkerEndpoint(replica="prefill-2", address=stopped.address)
        turns = await start_turns(prefillers=[endpoint], worker_silence_s=WORKER_SILENCE_S)

        async def ask(first: int) -> list:
            """Turns of as many groups at once; which worker computed each prompt, and at which attempt."""
            numbers = range(first, first + GROUPS)
            asked = [turns.ask(prompts[number], f"g{number}", samples=1, deadline_s=DEADLINE_S) for number in numbers]
            answers = await asyncio.gather(*asked)
            for number, answer in zip(numbers, answers, strict=True):
                assert tokens(answer) == [cluster.greedy(V1, prompts[number], 8)]
            return [(prompt_rows(answer).holder, "~" in prompt_rows(answer).key) for answer in answers]

        assert {holder for holder, _ in await ask(0)} == {stopped.address, cluster.members[0].address}
        async with asyncio.timeout(DEADLINE_S):  # else the router may take one of the two to be busy, and spare it
            while any(worker.load.blocks_used for worker in (await turns.workers()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stopped.stand_still()
        holders = await ask(GROUPS)
        assert {holder for holder, _ in holders} == {cluster.members[0].address}
        assert any(retried for _, retried in holders)
        stopped.signal(signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            while not (worker := (await turns.workers())["prefill-2"]).routable or worker.load.blocks_used:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert stopped.address in {holder for holder, _ in await ask(2 * GROUPS)}
        await turns.nothing_left()
    finally:
        await stopped.stop()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_a_worker_whose_engine_alone_stands_still_is_turned_away_within_a_bound_and_taken_back(
    cluster, start_turns, refusal, pool
):
    prompts = np.random.default_rng(9).integers(0, 23, (2 * GROUPS, 100)).tolist()
    engine = EmbeddedConfig(block_size_tokens=4, block_count=1024, silence_s=SILENCE_S)
    stopped = await cluster.add_worker(pool, f"{pool}-2", engine=engine)
    await stopped.serving(V1)
    turns = await start_turns()

    async def ask(first: int) -> None:
        numbers = range(first, first + GROUPS)
        asked = [turns.ask(prompts[number], f"g{number}", samples=1, deadline_s=DEADLINE_S) for number in numbers]
        for number, answer in zip(numbers, await asyncio.gather(*asked), strict=True):
            assert tokens(answer) == [cluster.greedy(V1, prompts[number], 8)]

    async def until(state: int, routable: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                worker = (await turns.workers())[f"{pool}-2"]
                if (worker.state, worker.routable) == (state, routable):
                    return
                await asyncio.sleep(0.05)

    go_on = threading.Event()
    stopped.worker.engine._post(lambda: go_on.wait(200))
    try:
        await ask(0)
        await until(worker_pb2.WORKER_STATE_SILENT, routable=False)
        assert "not moved" in (await stopped.describe()).stale_reason
        request = (
            stopped.prefill.Prefill(cluster.prefill_request(stopped))
            if pool == "prefill"
            else stopped.decode.Decode(cluster.decode_request(stopped, None))
        )
        assert await refusal(request) == "WORKER_STALE"
        await ask(0 + GROUPS)
    finally:
        go_on.set()
    await until(worker_pb2.WORKER_STATE_SERVING, routable=True)
    await turns.nothing_left()
