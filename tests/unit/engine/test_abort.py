"""Aborting in every phase ends the request and frees its blocks."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.common.errors import RequestAborted
from slipstream.engine.embedded.config import EmbeddedConfig
from tests.unit.engine.helpers import decode_request, finish, freed, prefill_request, started, weights

ONE_ROW = EmbeddedConfig(block_size_tokens=4, block_count=32, max_running_samples=1)


@pytest.fixture
async def engine():
    engine = await started(weights(1), ONE_ROW)
    yield engine
    await freed(engine)
    await engine.stop()


async def test_an_aborted_decode_ends_with_the_tokens_so_far(engine):
    running = asyncio.create_task(finish(engine, decode_request("running", samples=2, max_new_tokens=50)))
    waiting = asyncio.create_task(finish(engine, decode_request("waiting", samples=3)))
    async with asyncio.timeout(5):
        while not engine.load().decoded_tokens:  # noqa: ASYNC110 counters have no event
            await asyncio.sleep(0)
    assert await engine.abort("waiting") == 3
    assert await engine.abort("running") == 2  # one in the batch, one started and not admitted
    assert engine.load().blocks_used == 0
    first, second = await running
    assert (first.finish_reason, second.finish_reason) == ("aborted", "aborted")
    assert 0 < len(first.token_ids) < 50
    assert second.token_ids == []
    assert len(engine.routes("running/0")[0]) == len(first.token_ids)
    assert [sample.finish_reason for sample in await waiting] == ["aborted"] * 3
    assert await engine.abort("running") == 0


async def test_a_prefill_is_aborted_while_it_waits_and_while_it_is_held(engine):
    busy = asyncio.create_task(finish(engine, decode_request("busy", samples=2, max_new_tokens=50)))
    held = asyncio.create_task(engine.prefill(prefill_request("held")))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.prefill(prefill_request("waiting", salt="w")))
    await asyncio.sleep(0)
    assert await engine.abort("waiting") == 1
    with pytest.raises(RequestAborted):
        await waiting
    await busy
    await held
    assert engine.load().blocks_used == 3
    assert await engine.abort("held") == 1
    assert not engine.release_kv("held")


async def test_a_caller_that_leaves_aborts_its_request(engine):
    async for _ in engine.decode(decode_request(samples=2, max_new_tokens=50), flush_s=0.0):
        break
    stream = engine.decode(decode_request("again", samples=2, max_new_tokens=50), flush_s=0.0)
    await anext(stream)
    await stream.aclose()
    await freed(engine)
