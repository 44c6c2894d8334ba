"""Offloading in prefill and decode pools: the tiers beside NIXL, each with the routes it knows."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from slipstream.common.errors import KvTransferFailed
from slipstream.engine.base import KvReference
from slipstream.engine.vllm.offload.config import NativeOffloadConfig
from tests.engine.bench import prompt_of, until
from tests.offload.conftest import BLOCK_BYTES, Offloading, offloading
from tests.offload.test_vllm import LONG, WHOLE_BLOCKS, load, new_salt

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pools(model_dir: Path) -> AsyncIterator[tuple[Offloading, Offloading]]:
    """A prefill and a decode worker."""
    offload = NativeOffloadConfig(memory_bytes=96 * BLOCK_BYTES)
    async with offloading(model_dir, offload, "nixl") as prefiller, offloading(model_dir, offload, "nixl") as decoder:
        yield prefiller, decoder
    assert not list(Path("/dev/shm").glob(f"vllm_offload_slipstream-{os.getpid()}-*"))


async def computed(prefiller: Offloading, prompt: list[int], salt: str, name: str) -> tuple[KvReference, int]:
    """A prompt of the prefill worker, whose routes are the oracle's; how much of it was there already."""
    job = replace(prefiller.prefill_request(prompt, salt), request_id=name)
    result = await prefiller.engine.prefill(job)
    routes = prefiller.engine.routes(name)
    assert (routes.first_position, routes.end, routes.unknown_ranges) == (0, len(prompt) - 1, ())
    expected = prefiller.oracle.forward(prompt).routes[: routes.end]
    assert np.array_equal(np.sort(routes.rows, -1), np.sort(expected, -1))
    return prefiller.engine.lease_kv(name), result.cached_token_count


async def test_figures_of_both_can_be_logged_by_vllm(pools):
    from slipstream.engine.vllm.offload.beside import TransferAndOffload

    stats = TransferAndOffload.build_kv_connector_stats({"NixlConnector": {}, "OffloadConnector": {}})
    assert stats is not None
    assert stats.reduce().keys() == {"NixlConnector", "OffloadConnector"}


async def test_an_evicted_prefix_comes_back_at_the_prefill_worker_and_is_sent_on(pools):
    prefiller, decoder = pools
    salt, prompt = new_salt(), prompt_of(LONG, 1)
    expected = await decoder.greedy(prompt, 12)
    for turn, found in enumerate((0, WHOLE_BLOCKS)):
        kv, cached = await computed(prefiller, prompt, salt, f"{salt}-{turn}")
        assert cached == found
        (sample,) = await decoder.ask(prompt, kv=kv, temperature=0.0, max_new_tokens=12)
        assert (sample.token_ids, sample.cached_token_count) == (expected, LONG - 1)
        prefiller.engine.release_kv(kv.transfer_id)
        await prefiller.idle()
        await prefiller.forget()
    assert load(prefiller).hit_tokens >= WHOLE_BLOCKS


async def test_what_was_transferred_comes_back_at_the_decode_worker_and_its_routes_stay_unknown(pools):
    """Rows of the prompt are at the prefill worker alone; those of the sampled tokens went with their blocks."""
    prefiller, decoder = pools
    salt, prompt = new_salt(), prompt_of(2 * 32 + 9, 2)
    kv, _ = await computed(prefiller, prompt, salt, salt)
    (first,) = await decoder.ask(prompt, kv=kv, salt=salt, temperature=0.0, max_new_tokens=64)
    prefiller.engine.release_kv(salt)
    longer = [*prompt, *first.token_ids, 1, 2, 3]
    await decoder.forget()
    before = load(decoder).hit_tokens
    request = decoder.request(longer, salt=salt, temperature=0.0, max_new_tokens=8)
    (second,) = await decoder.run(request)
    hit = (len(prompt) + 64 - 1) // 32 * 32
    assert second.cached_token_count == load(decoder).hit_tokens - before == hit
    assert decoder.error_of(longer, second, None, 0.0) < decoder.kind.tolerance
    routes = decoder.engine.routes(request.request_id)
    assert routes.unknown_ranges == ((0, len(prompt) - 1),)
    expected = decoder.oracle.forward(longer).routes[: routes.end]
    assert np.array_equal(np.sort(routes.rows[routes.known()], -1), np.sort(expected[routes.known()], -1))


async def test_the_end_of_a_salt_frees_the_tiers_of_both(pools):
    prefiller, decoder = pools
    salt, prompt = new_salt(), prompt_of(LONG, 3)
    kv, _ = await computed(prefiller, prompt, salt, salt)
    await decoder.ask(prompt, kv=kv, salt=salt, max_new_tokens=2)
    prefiller.engine.release_kv(salt)
    for bench in pools:
        await bench.forget()
        held = load(bench).memory_bytes
        bench.engine.end_salt(salt)
        await until(lambda bench=bench, held=held: load(bench).memory_bytes < held, "freed bytes")
        assert load(bench).dead_bytes == 0
    _, cached = await computed(prefiller, prompt, salt, f"{salt}-again")
    assert cached == 0
    prefiller.engine.release_kv(f"{salt}-again")
    for bench in pools:
        await bench.idle()


async def test_a_transfer_that_fails_leaves_nothing_in_pool_or_tiers(pools):
    prefiller, decoder = pools
    salt, prompt = new_salt(), prompt_of(LONG, 4)
    kv, _ = await computed(prefiller, prompt, salt, salt)
    with pytest.raises(KvTransferFailed):
        await decoder.ask(prompt, kv=replace(kv, lease_s=0.0), salt=salt)
    assert await prefiller.engine.abort(salt) == 1
    for bench in pools:
        await bench.idle()
    (sample,) = await decoder.ask(prompt, salt=salt, temperature=0.0)
    assert sample.cached_token_count == 0
    decoder.oracle.assert_greedy(prompt, sample.token_ids, decoder.kind.tolerance)
