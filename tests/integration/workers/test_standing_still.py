"""A prefill worker that stands still, as under a debugger: its turns go to another as soon as the router knows."""

from __future__ import annotations

import asyncio
import signal
import time

import numpy as np
import pytest

from slipstream.common.version import PolicyVersion
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.router.config import WorkerEndpoint
from tests.integration.workers.processes import start_prefiller
from tests.integration.workers.test_turns import prompt_rows, tokens

pytestmark = pytest.mark.timeout(120)

V1 = PolicyVersion(1, 1)
SILENCE_S = 1.5
SLACK_S = 2.0
"""To compute the turn again, on a machine that is busy."""
GROUPS = 6


async def test_turns_of_a_prefill_worker_that_stands_still_end_within_the_bound_of_its_silence(
    cluster, start_turns, valkey_url
):
    prompts = np.random.default_rng(9).integers(0, 23, (3 * GROUPS, 100)).tolist()
    engine = EmbeddedConfig(block_size_tokens=4, block_count=1024)
    stopped = await start_prefiller(cluster, "prefill-2", valkey_url, engine=engine)
    try:
        endpoint = WorkerEndpoint(replica="prefill-2", address=stopped.address)
        turns = await start_turns(prefillers=[endpoint], worker_silence_s=SILENCE_S)

        async def ask(first: int) -> list:
            """Turns of as many groups at once; which worker computed each prompt, and at which attempt."""
            numbers = range(first, first + GROUPS)
            asked = [turns.ask(prompts[number], f"g{number}", samples=1, deadline_s=30.0) for number in numbers]
            answers = await asyncio.gather(*asked)
            for number, answer in zip(numbers, answers, strict=True):
                assert tokens(answer) == [cluster.greedy(V1, prompts[number], 8)]
            return [(prompt_rows(answer).holder, "~" in prompt_rows(answer).key) for answer in answers]

        assert {holder for holder, _ in await ask(0)} == {stopped.address, cluster.members[0].address}
        stopped.signal(signal.SIGSTOP)
        started_s = time.monotonic()
        holders = await ask(GROUPS)
        took_s = time.monotonic() - started_s
        assert {holder for holder, _ in holders} == {cluster.members[0].address}
        assert {retried for _, retried in holders} == {True, False}
        assert took_s < SILENCE_S + SLACK_S
        stopped.signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while not (worker := (await turns.workers())["prefill-2"]).routable or worker.load.blocks_used:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert stopped.address in {holder for holder, _ in await ask(2 * GROUPS)}
        await turns.nothing_left()
    finally:
        await stopped.stop()
