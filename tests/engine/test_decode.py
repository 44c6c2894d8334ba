"""Decoding: the tokens of a plain loop over full forward passes, whatever else is in the batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.engine.bench import DEADLINE_S, Bench, prompt_of, unique
from tests.engine.engines import CHUNK_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("blocks", [0, 1, 2], ids=["no block", "one block", "two blocks"])
@pytest.mark.parametrize("beside", [1, 2, -1])
async def test_greedy_tokens_are_those_of_the_full_forward(bench: Bench, blocks, beside):
    """Prompts that end beside a block's end; the last prompt token's KV is decode's to compute."""
    length = blocks * bench.block + beside
    prompt = prompt_of(max(length, 1))
    samples = await bench.ask(prompt, 2, temperature=0.0, max_new_tokens=12)
    assert samples[0].token_ids == samples[1].token_ids
    assert [sample.finish_reason for sample in samples] == ["length"] * 2
    bench.oracle.assert_greedy(prompt, samples[0].token_ids, bench.kind.tolerance)


async def test_greedy_tokens_are_the_same_in_any_batch(bench: Bench):
    prompts = [prompt_of(bench.block + 3 * index, seed=index) for index in range(6)]
    alone = [await bench.greedy(prompt, 16) for prompt in prompts]
    salts = [unique("salt") for _ in prompts]
    together = await asyncio.gather(*(bench.greedy(p, 16, salt=s) for p, s in zip(prompts, salts, strict=True)))
    again = await asyncio.gather(*(bench.greedy(p, 16, salt=s) for p, s in zip(prompts, salts, strict=True)))
    crowd = [bench.ask(prompt_of(5 + index, seed=50 + index), 3, seed=index) for index in range(8)]
    crowded, *_ = await asyncio.gather(bench.greedy(prompts[0], 16), *crowd)
    assert alone == together == again
    assert crowded == alone[0]


async def test_draws_depend_on_seed_and_sample_and_not_on_the_batch(bench: Bench):
    prompt = prompt_of(2 * bench.block + 3)
    alone = [sample.token_ids for sample in await bench.ask(prompt, 4)]
    crowd = [bench.ask(prompt[: index + 1], 3, seed=index) for index in range(8)]
    together, *_ = await asyncio.gather(bench.ask(prompt, 4), *crowd)
    other = [sample.token_ids for sample in await bench.ask(prompt, 4, seed=8)]
    assert [sample.token_ids for sample in together] == alone
    assert len({tuple(tokens) for tokens in alone + other}) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_a_sample_that_goes_on_from_its_own_tokens_is_the_one_that_never_stopped(bench: Bench, temperature):
    """By its index among its siblings it keeps its own draws, though it is alone in its request."""
    prompt = prompt_of(bench.block + 3)
    whole = await bench.ask(prompt, 3, max_new_tokens=24, temperature=temperature)
    for index, sample in enumerate(whole):
        cut = 5 + 6 * index
        request = bench.request([*prompt, *sample.token_ids[:cut]], max_new_tokens=24 - cut, temperature=temperature)
        (rest,) = await bench.run(replace(request, sample_indexes=(index,)))
        assert rest.token_ids == sample.token_ids[cut:]
        assert rest.logprobs == pytest.approx(sample.logprobs[cut:], abs=10 * bench.kind.tolerance)


async def test_32_requests_at_once_all_end_and_none_is_mixed_up(bench: Bench):
    prompts = [prompt_of(3 + 2 * index, seed=index) for index in range(32)]
    samples = await asyncio.gather(*(bench.ask(p, temperature=0.0, max_new_tokens=10) for p in prompts))
    for prompt, (sample,) in zip(prompts, samples, strict=True):
        assert len(sample.token_ids) == 10
        bench.oracle.assert_greedy(prompt, sample.token_ids, bench.kind.tolerance)


async def test_more_samples_than_run_at_once_run_in_turn(bench: Bench):
    prompt = prompt_of(bench.block + 1)
    count = bench.engine.limits.max_running_samples * 2 + 5
    samples = await bench.ask(prompt, count, temperature=0.0, max_new_tokens=4)
    assert len({tuple(sample.token_ids) for sample in samples}) == 1
    bench.oracle.assert_greedy(prompt, samples[0].token_ids, bench.kind.tolerance)


async def test_a_stop_token_ends_a_sample_and_belongs_to_it(bench: Bench):
    prompt = prompt_of(bench.block + 2)
    free = await bench.greedy(prompt, 12)
    stop = free[5]
    (sample,) = await bench.ask(prompt, temperature=0.0, max_new_tokens=12, stop_token_ids=(stop,))
    assert sample.token_ids == free[: free.index(stop) + 1]
    assert sample.finish_reason == "stop"
    (sample,) = await bench.ask(prompt, temperature=0.0, max_new_tokens=1, stop_token_ids=(free[0],))
    assert (sample.token_ids, sample.finish_reason) == (free[:1], "stop")


@pytest.mark.parametrize("count", [1, 2, 9])
async def test_max_new_tokens_is_the_most(bench: Bench, count):
    for sample in await bench.ask(prompt_of(7), 3, max_new_tokens=count):
        assert len(sample.token_ids) == count
        assert sample.finish_reason == "length"


async def test_a_context_may_be_filled_to_the_last_token(bench: Bench):
    limit = bench.engine.limits.max_context_tokens
    prompt = prompt_of(limit - 5)
    (sample,) = await bench.ask(prompt, temperature=0.0, max_new_tokens=5)
    assert (len(sample.token_ids), sample.finish_reason) == (5, "length")
    bench.oracle.assert_greedy(prompt, sample.token_ids, bench.kind.tolerance)


async def test_running_samples_go_on_while_a_long_prompt_is_computed(bench: Bench):
    """Where prompts are cut; else the prompt is one step, and the sample has a gap."""
    stream = bench.engine.decode(bench.request(prompt_of(5), max_new_tokens=250), flush_s=0.0)
    await anext(stream)
    prompt = prompt_of(bench.engine.limits.max_context_tokens - 8, seed=5)
    before = bench.engine.load()
    await bench.ask(prompt, max_new_tokens=1)
    after = bench.engine.load()
    assert after.prefilled_tokens - before.prefilled_tokens == len(prompt) - 1
    if bench.engine.capabilities.chunked_prefill:
        assert after.decode_steps - before.decode_steps >= len(prompt) // CHUNK_TOKENS - 1
    await stream.aclose()
    bench.oracle.assert_greedy(prompt, await bench.greedy(prompt), bench.kind.tolerance)


async def test_chunks_come_as_often_as_asked(bench: Bench):
    (often,) = await bench.run(bench.request(prompt_of(5), max_new_tokens=200), flush_s=0.0)
    (seldom,) = await bench.run(bench.request(prompt_of(5), max_new_tokens=200), flush_s=2 * DEADLINE_S)
    assert 1 < often.chunk_count <= 200  # tokens that came while nobody looked come together
    assert seldom.chunk_count == 1
    assert often.token_ids == seldom.token_ids
