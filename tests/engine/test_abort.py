"""Aborting in every phase ends the request, frees its blocks, and touches nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from slipstream.common.errors import KvUnknown, RequestAborted
from tests.engine.bench import DEADLINE_S, Bench, Factory, prompt_of, unique, until
from tests.engine.engines import Limits

pytestmark = pytest.mark.asyncio(loop_scope="session")

ABORTS_A_PHASE = 200
ROWS = 5
SAMPLES = 2


class Steady:
    """Requests that decode all the time beside the aborted ones, each equal to the undisturbed run."""

    def __init__(self, bench: Bench, count: int) -> None:
        self.bench = bench
        self.prompts = [prompt_of(20 + index, seed=90 + index) for index in range(count)]
        self.expected: list[list[int]] = []
        self.rounds = 0

    async def start(self) -> None:
        self.expected = [await self.bench.greedy(prompt, 60) for prompt in self.prompts]

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set() or not self.rounds:
            answers = await asyncio.gather(*(self.bench.greedy(prompt, 60) for prompt in self.prompts))
            assert answers == self.expected
            self.rounds += 1


def pause_s(number: int, attempt: int) -> float:
    """A random time, shorter each time that the phase was over by then."""
    return random.Random(number).uniform(0, 0.02) / 2**attempt


async def abort_queued(bench: Bench, number: int, _: Bench, attempt: int) -> bool:
    """All rows are taken, so the request waits; False if a row came free meanwhile."""
    request = bench.request(prompt_of(9, seed=number), SAMPLES)
    waiting = asyncio.create_task(bench.run(request))
    await until(lambda: bench.engine.load().waiting_requests >= 1 or waiting.done(), "a request that waits")
    ended = 0
    while not ended and not waiting.done():  # what waits may have been another
        ended = await bench.engine.abort(request.request_id)
    samples = await waiting
    if ended < SAMPLES:  # one ran through before
        return False
    assert {sample.finish_reason for sample in samples} == {"aborted"}
    return not any(sample.token_ids for sample in samples)


async def abort_computing(bench: Bench, number: int, _: Bench, attempt: int) -> bool:
    """A decode request whose prompt is computed in this engine; False if its first token was there already."""
    request = bench.request(prompt_of(200, seed=number), SAMPLES, max_new_tokens=40)
    running = asyncio.create_task(bench.run(request))
    await asyncio.sleep(pause_s(number, attempt))
    ended = await bench.engine.abort(request.request_id)
    samples = await running
    assert ended == sum(sample.finish_reason == "aborted" for sample in samples)
    return ended == SAMPLES and not any(sample.token_ids for sample in samples)


async def abort_prefilling(bench: Bench, number: int, _: Bench, attempt: int) -> bool:
    """At any moment from before its first step to after its last."""
    job = bench.prefill_request(prompt_of(150, seed=number))
    running = asyncio.create_task(bench.engine.prefill(job))
    await asyncio.sleep(pause_s(number, attempt))
    assert await bench.engine.abort(job.request_id) == 1
    with suppress(RequestAborted):  # or it ended before, and its KV went with the abort
        await running
    assert not bench.engine.release_kv(job.request_id)
    return True


async def abort_transferring(bench: Bench, number: int, prefiller: Bench, attempt: int) -> bool:
    """The prefill's KV is held for whoever fetches it; and a decode request is aborted at any moment of fetching it."""
    prompt, salt = prompt_of(40, seed=number), unique("salt")
    job = prefiller.prefill_request(prompt, salt)
    await prefiller.engine.prefill(job)
    kv = await bench.kind.transfer(prefiller.engine, job.request_id)
    request = bench.request(prompt, SAMPLES, salt=salt, kv=kv, max_new_tokens=200)
    importing = asyncio.create_task(bench.run(request))
    for _ in range(random.Random(number).choice([1, 1, 5, 50])):
        await asyncio.sleep(0)
    await bench.engine.abort(request.request_id)
    assert {sample.finish_reason for sample in await importing} == {"aborted"}
    await prefiller.engine.abort(job.request_id)  # where the decode engine read it all, it is free already
    assert not prefiller.engine.release_kv(job.request_id)
    with pytest.raises(KvUnknown):
        await bench.kind.transfer(prefiller.engine, job.request_id)
    return True


async def abort_decoding(bench: Bench, number: int, _: Bench, attempt: int) -> bool:
    """What was sampled so far is kept, with its routes. Every fifth caller just leaves."""
    request = bench.request(prompt_of(9, seed=number), SAMPLES, max_new_tokens=200)
    stream = bench.engine.decode_batches(request, flush_s=0.0)
    tokens = {0: 0, 1: 0}
    ended = set()
    for chunk in await anext(stream):
        tokens[chunk.sample_index] += len(chunk.token_ids)
    if number % 5 == 0:
        await stream.aclose()
        return True
    assert await bench.engine.abort(request.request_id) == SAMPLES
    async for chunks in stream:
        for chunk in chunks:
            tokens[chunk.sample_index] += len(chunk.token_ids)
            ended |= {(chunk.sample_index, chunk.finish_reason)} if chunk.finish_reason else set()
    assert ended == {(0, "aborted"), (1, "aborted")}
    assert await bench.engine.abort(request.request_id) == 0
    assert max(tokens.values()) > 0
    for index, count in tokens.items():
        if request.capture_routes and count:
            assert len(bench.engine.routes(request.sample_ids[index]).rows) == count
    return True


PHASES = [abort_queued, abort_computing, abort_prefilling, abort_transferring, abort_decoding]
OF_A_PREFILL_POOL = (abort_prefilling, abort_transferring)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(build: Factory) -> AsyncIterator[Bench]:
    """An engine of few rows."""
    async with build(Limits(running_samples=ROWS)) as bench:
        yield bench


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_aborts_free_all_blocks_and_leave_others_untouched(narrow: Bench, prefiller: Bench, phase):
    if phase in OF_A_PREFILL_POOL and not narrow.engine.capabilities.prefills:
        assert await narrow.prefill(narrow.prefill_request(prompt_of(40))) is None
        return
    steady = Steady(narrow, ROWS if phase is abort_queued else ROWS - SAMPLES)
    done = asyncio.Event()
    await steady.start()
    others = asyncio.create_task(steady.run(done))
    await until(lambda: narrow.engine.load().running_samples == len(steady.prompts), "the steady requests")
    try:
        for number in range(ABORTS_A_PHASE):
            attempt = 0
            async with asyncio.timeout(DEADLINE_S):
                while not await phase(narrow, number, prefiller, attempt):
                    attempt += 1
            assert not others.done(), others.exception()
    finally:
        done.set()
        await others
    await narrow.idle()
    assert await narrow.greedy(steady.prompts[0], 60) == steady.expected[0]


async def test_an_abort_is_answered_once_the_blocks_are_free(bench: Bench):
    request = bench.request(prompt_of(30), samples=8, max_new_tokens=200)
    running = asyncio.create_task(bench.run(request))
    await until(lambda: bench.engine.load().running_samples == 8, "running samples")
    assert bench.engine.load().blocks_used > 0
    assert await bench.engine.abort(request.request_id) == 8
    assert bench.engine.load().blocks_used == 0
    assert bench.engine.load().running_samples == 0
    await running


async def test_an_unknown_id_aborts_nothing(bench: Bench):
    assert await bench.engine.abort("nobody") == 0
