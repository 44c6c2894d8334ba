"""A prompt computed by one engine and decoded by another: the same tokens, and KV that is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.common.errors import KvMismatch, KvUnknown, RequestIdReused, Unsupported
from slipstream.engine.base import FRAMES
from tests.engine.bench import Bench, Factory, prompt_of, unique
from tests.engine.engines import Limits

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("beside", [1, 2, 0, -1])
async def test_greedy_tokens_are_a_single_engines(bench: Bench, prefiller: Bench, blocks, beside):
    prompt = prompt_of(max(blocks * bench.block + beside, 1), seed=1)
    expected = await bench.greedy(prompt, 12)
    result = await prefiller.prefill(prefiller.prefill_request(prompt))
    if result is None:
        return
    assert (result.token_count, result.cached_token_count) == (len(prompt) - 1, 0)
    assert result.version == result.kv_oldest_version == prefiller.version
    kv = await bench.kind.transfer(prefiller.engine, result.transfer_id)
    before = bench.engine.load().prefilled_tokens
    samples = await bench.ask(prompt, 3, kv=kv, temperature=0.0, max_new_tokens=12)
    assert [sample.token_ids for sample in samples] == [expected] * 3
    assert bench.engine.load().prefilled_tokens == before
    assert prefiller.engine.release_kv(result.transfer_id)
    assert not prefiller.engine.release_kv(result.transfer_id)


@pytest.mark.parametrize("field", ["prompt_hash", "salt", "token_count"])
async def test_kv_of_another_prompt_or_salt_is_refused_and_nothing_of_it_is_cached(
    bench: Bench, prefiller: Bench, field
):
    asked = prompt_of(2 * bench.block + 5, seed=2)
    expected, salt = await bench.greedy(asked, 12), unique("salt")
    other = prompt_of(len(asked) + (field == "token_count"), seed=3) if field != "salt" else asked
    result = await prefiller.prefill(prefiller.prefill_request(other, unique("salt") if field == "salt" else salt))
    if result is None:
        return
    kv = await bench.kind.transfer(prefiller.engine, result.transfer_id)
    with pytest.raises(KvMismatch) as refused:
        await bench.ask(asked, kv=kv, salt=salt)
    assert refused.value.metadata["field"] == field
    (sample,) = await bench.ask(asked, salt=salt, temperature=0.0, max_new_tokens=12)
    assert (sample.token_ids, sample.cached_token_count) == (expected, 0)
    assert prefiller.engine.release_kv(result.transfer_id)


async def test_prefills_hit_the_cache_by_salt(prefiller: Bench):
    prompt, salt = prompt_of(2 * prefiller.block + 3), unique("salt")
    jobs = [prefiller.prefill_request(prompt, each) for each in (salt, salt, unique("salt"))]
    results = [result for job in jobs if (result := await prefiller.prefill(job))]
    if not results:
        return
    assert [result.cached_token_count for result in results] == [0, 2 * prefiller.block, 0]
    if prefiller.engine.capabilities.captures_routes:
        rows = [prefiller.engine.routes(job.request_id).rows.tolist() for job in jobs]
        assert rows[0] == rows[1] == rows[2]
    for result in results:
        assert prefiller.engine.release_kv(result.transfer_id)


async def test_a_prefill_under_the_same_id_asks_for_the_same(prefiller: Bench):
    engine, job = prefiller.engine, prefiller.prefill_request(prompt_of(20))
    first = await prefiller.prefill(job)
    if first is None:
        return
    assert await engine.prefill(job) == first
    with pytest.raises(RequestIdReused):
        await engine.prefill(replace(job, token_ids=prompt_of(7)))
    assert engine.release_kv(first.transfer_id)
    if engine.capabilities.captures_routes:
        rows = engine.routes(job.request_id).rows.tolist()
        with pytest.raises(RequestIdReused):  # whoever has a reference to its routes would read those of another
            await engine.prefill(replace(job, token_ids=prompt_of(7)))
        again = await engine.prefill(job)
        assert engine.release_kv(again.transfer_id)
        assert engine.routes(job.request_id).rows.tolist() == rows
        assert engine.release_routes(job.request_id)
    assert (await engine.prefill(replace(job, token_ids=prompt_of(7)))).token_count == 6
    assert engine.release_kv(first.transfer_id)


async def test_kv_that_nobody_fetches_expires(prefiller: Bench, build: Factory):
    if not prefiller.engine.capabilities.prefills:
        assert await prefiller.prefill(prefiller.prefill_request(prompt_of(20))) is None
        return
    async with build(Limits(transfer_ttl_s=2.0)) as bench:
        result = await bench.engine.prefill(bench.prefill_request(prompt_of(20)))
        assert bench.engine.load().blocks_used > 0
        await bench.idle()
        assert not bench.engine.release_kv(result.transfer_id)


async def test_kv_leaves_and_enters_by_the_protocol_or_is_refused(bench: Bench, prefiller: Bench):
    prompt = prompt_of(20)
    result = await prefiller.prefill(prefiller.prefill_request(prompt))
    if result is None:
        with pytest.raises(KvUnknown):
            prefiller.engine.export_kv("never-held")
        return
    if FRAMES not in prefiller.engine.capabilities.kv_transports:
        with pytest.raises(Unsupported):
            prefiller.engine.export_kv(result.transfer_id)
    else:
        kv = prefiller.engine.export_kv(result.transfer_id)
        again = prefiller.engine.export_kv(result.transfer_id)
        assert bytes(kv.data) == bytes(again.data)
        assert memoryview(kv.data).nbytes == 19 * bench.engine.limits.kv_bytes_per_token
        with pytest.raises(KvMismatch):
            await bench.ask(prompt[:-1], kv=kv)
        with pytest.raises(KvMismatch):
            await bench.ask(prompt, kv=replace(kv, data=bytes(kv.data)[:-4]))
    prefiller.engine.release_kv(result.transfer_id)
    if FRAMES in prefiller.engine.capabilities.kv_transports:
        with pytest.raises(KvUnknown):
            prefiller.engine.export_kv(result.transfer_id)
