"""Decoding against a plain full-forward loop, through one engine and through a prefill and a decode engine."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from slipstream.common.errors import (
    ContextTooLong,
    EngineFull,
    InvalidRequest,
    KvMismatch,
    KvUnknown,
    NoWeights,
    RequestIdReused,
)
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.engine import EmbeddedEngine
from slipstream.models.documents import Documents
from tests.unit.engine.helpers import (
    CONFIG,
    PROMPT,
    SIZES,
    V1,
    decode_request,
    finish,
    freed,
    greedy,
    logprobs,
    prefill_request,
    started,
    weights,
)


@pytest.fixture
async def engine():
    engine = await started(weights(1))
    yield engine
    assert engine.load().blocks_used == len(engine._transfers) * 3
    engine._core.blocks.check()
    await engine.stop()


@pytest.fixture
async def prefiller():
    engine = await started(weights(1))
    yield engine
    await engine.stop()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 11, 12, 13])
async def test_greedy_output_equals_the_full_forward_loop(engine, prefiller, length):
    model, prompt = weights(1), (PROMPT * 2)[:length]
    expected = greedy(model, prompt, 12)
    options = {"prompt": prompt, "temperature": 0.0, "max_new_tokens": 12}
    assert [s.token_ids for s in await finish(engine, decode_request("own", 2, **options))] == [expected] * 2
    result = await prefiller.prefill(prefill_request(prompt=prompt))
    assert result.token_count == length - 1
    kv = prefiller.export_kv(result.transfer_id)
    request = decode_request("split", 3, salt="other", kv=kv, **options)
    assert [s.token_ids for s in await finish(engine, request)] == [expected] * 3
    assert prefiller.release_kv(result.transfer_id)
    with pytest.raises(KvUnknown):
        prefiller.export_kv(result.transfer_id)


async def test_sampled_logprobs_equal_a_full_forward(engine):
    model = weights(1)
    for sample in await finish(engine, decode_request(samples=8, max_new_tokens=20)):
        full = logprobs(model, PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1]
        expected = full.gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
        assert torch.tensor(sample.logprobs) == pytest.approx(expected, abs=1e-5)
        assert sample.versions == [V1] * 20
        assert sample.oldest == {V1}


async def test_the_trainers_packed_forward_with_replayed_routes_gives_the_engines_logprobs(engine, prefiller):
    model = weights(1)
    result = await prefiller.prefill(prefill_request("p"))
    request = decode_request(samples=6, kv=prefiller.export_kv(result.transfer_id), stop_token_ids=(2, 3))
    samples = await finish(engine, request)
    prompt_rows, first = prefiller.routes("p")
    assert (first, len(prompt_rows)) == (0, len(PROMPT) - 1)
    rows, tokens, lengths = [], [], []
    for index, sample in enumerate(samples):
        own, first = engine.routes(f"d/{index}")
        assert (first, len(own)) == (len(PROMPT) - 1, len(sample.token_ids))
        rows += [torch.tensor(prompt_rows.tolist()), torch.tensor(own.tolist())]
        tokens += PROMPT + sample.token_ids[:-1]
        lengths.append(len(PROMPT) + len(sample.token_ids) - 1)
    documents = Documents.of_lengths(lengths)
    model.routes.begin(replay_TLK=torch.cat(rows).to(torch.uint8))
    full = torch.log_softmax(model(torch.tensor([tokens]), documents.positions_1T, documents)[0], -1)
    for sample, document in zip(samples, full.split(lengths), strict=True):
        expected = document[len(PROMPT) - 1 :].gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
        assert torch.tensor(sample.logprobs) == pytest.approx(expected, abs=1e-5)


async def test_samples_do_not_depend_on_what_else_is_in_the_batch(engine):
    alone = [s.token_ids for s in await finish(engine, decode_request("alone", 4))]
    crowd = [finish(engine, decode_request(f"c{i}", 3, salt=f"{i}", seed=i, prompt=PROMPT[: i + 1])) for i in range(8)]
    together, *_ = await asyncio.gather(finish(engine, decode_request("again", 4, salt="x")), *crowd)
    assert [s.token_ids for s in together] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


async def test_a_prefix_hit_gives_the_same_tokens_and_other_salts_compute_everything(engine):
    first = await finish(engine, decode_request("a"))
    again = await finish(engine, decode_request("b"))
    other = await finish(engine, decode_request("c", salt="other"))
    assert [first[0].cached_token_count, again[0].cached_token_count, other[0].cached_token_count] == [0, 8, 0]
    assert first[0].token_ids == again[0].token_ids == other[0].token_ids


async def test_prefill_hits_its_cache_by_salt_and_repeats_answer_the_same(engine):
    first = await engine.prefill(prefill_request("a"))
    second = await engine.prefill(prefill_request("b"))
    other = await engine.prefill(prefill_request("c", salt="other"))
    assert [first.cached_token_count, second.cached_token_count, other.cached_token_count] == [0, 8, 0]
    assert await engine.prefill(prefill_request("a")) is first
    assert engine.routes("a")[0].tolist() == engine.routes("b")[0].tolist()
    for transfer_id in "abc":
        assert engine.release_kv(transfer_id)
    await freed(engine)


async def test_kv_that_nobody_fetches_expires(prefiller):
    brief = await started(weights(1), CONFIG.model_copy(update={"transfer_ttl_s": 0.05}))
    result = await brief.prefill(prefill_request())
    assert brief.load().blocks_used == 3
    await asyncio.sleep(0.2)
    await freed(brief)
    assert not brief.release_kv(result.transfer_id)
    await brief.stop()


async def test_a_stop_token_ends_a_sample_and_belongs_to_it(engine):
    expected = greedy(weights(1), PROMPT, 8)
    request = decode_request(temperature=0.0, stop_token_ids=(expected[3],))
    (sample,) = await finish(engine, request)
    assert sample.token_ids == expected[: expected.index(expected[3]) + 1]
    assert sample.finish_reason == "stop"


async def test_more_samples_than_rows_run_in_turn(engine):
    model = weights(1)
    samples = await finish(engine, decode_request(samples=50, temperature=0.0))
    assert [s.token_ids for s in samples] == [greedy(model, PROMPT, 8)] * 50


async def test_chunks_come_as_often_as_asked(engine):
    chunks = [chunk async for chunk in engine.decode(decode_request(max_new_tokens=10), flush_s=0.0)]
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 10
    assert [chunk.finish_reason for chunk in chunks] == [""] * 9 + ["length"]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
async def test_top_k_and_top_p_cut_what_can_be_sampled_but_not_the_logprobs(engine, cut):
    model = weights(1)
    best = greedy(model, PROMPT, 8)
    (sample,) = await finish(engine, decode_request(**cut))
    assert sample.token_ids == best
    full = logprobs(model, PROMPT + best)[len(PROMPT) - 1 : -1].max(-1).values
    assert torch.tensor(sample.logprobs) == pytest.approx(full, abs=1e-5)


async def test_requests_over_a_limit_are_refused(engine):
    with pytest.raises(ContextTooLong):
        await finish(engine, decode_request(max_new_tokens=SIZES.max_context_tokens))
    with pytest.raises(ContextTooLong):
        await engine.prefill(prefill_request(prompt=[1] * (SIZES.max_context_tokens + 1)))
    with pytest.raises(InvalidRequest):
        await engine.prefill(prefill_request(prompt=[SIZES.vocab_size]))
    result = await engine.prefill(prefill_request())
    with pytest.raises(KvMismatch):
        await finish(engine, decode_request(prompt=PROMPT[:-1], kv=engine.export_kv(result.transfer_id)))


async def test_a_full_queue_refuses_the_next_request():
    small = EmbeddedConfig(block_size_tokens=4, block_count=32, max_running_samples=1, max_waiting_requests=2)
    engine = await started(weights(1), small)
    running = [asyncio.create_task(finish(engine, decode_request(f"r{i}", max_new_tokens=40))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineFull):
        await finish(engine, decode_request("late"))
    await asyncio.gather(*running)
    await engine.stop()


async def test_an_engine_without_weights_refuses():
    engine = EmbeddedEngine(SIZES, CONFIG)
    await engine.start()
    with pytest.raises(NoWeights):
        await engine.prefill(prefill_request())
    await engine.stop()


async def test_work_is_logged_as_intervals_and_cache_changes_as_events(engine):
    await finish(engine, decode_request())
    await asyncio.sleep(1.05)
    kinds = [interval.kind for interval in engine.drain_busy()]
    assert sorted(kinds) == ["decode", "prefill"]
    (stored,) = engine.drain_kv_events()
    assert (stored.kind, len(stored.block_hashes)) == ("stored", 2)
    load = engine.load()
    assert (load.decoded_tokens, load.prefilled_tokens, load.prefix_query_tokens) == (8, 10, 10)


async def test_operators_run_with_the_configured_number_of_threads():
    engine = await started(weights(0), CONFIG.model_copy(update={"torch_threads": 2}))
    try:
        seen = await engine.checksums(lambda name, array: torch.get_num_threads())
    finally:
        await engine.stop()
    assert set(seen.values()) == {2}


async def test_a_prefill_under_the_same_id_asks_for_the_same(prefiller):
    first = await prefiller.prefill(prefill_request())
    assert (await prefiller.prefill(prefill_request())).transfer_id == first.transfer_id
    with pytest.raises(RequestIdReused):
        await prefiller.prefill(prefill_request(prompt=PROMPT[:4]))
    prefiller.release_kv("p")
    assert (await prefiller.prefill(prefill_request(prompt=PROMPT[:4]))).token_count == 3
    prefiller.release_kv("p")


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
async def test_a_temperature_near_nothing_is_greedy(engine, temperature):
    sample = (await finish(engine, decode_request(temperature=temperature, max_new_tokens=6)))[0]
    assert sample.token_ids == greedy(weights(1), PROMPT, 6)


async def test_two_samples_of_one_id_are_refused(engine):
    request = dataclasses.replace(decode_request(samples=2), sample_ids=("x", "x"))
    with pytest.raises(InvalidRequest):
        await finish(engine, request)
