"""The salt invariant: a rollout dispatched at a version never reads KV that older weights computed."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.bench import Bench, Factory, prompt_of, unique, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def salt_of(run: str, incarnation: int, step: int) -> str:
    """As the orchestrator makes them."""
    return f"{run}/{incarnation}/{step}/float32"


async def cached_at(bench: Bench, prompt: list[int], salt: str) -> int:
    return (await bench.ask(prompt, salt=salt, max_new_tokens=2))[0].cached_token_count


async def test_the_first_request_of_each_version_computes_every_prompt_token_and_the_second_hits(bench: Bench):
    prompt, run = prompt_of(2 * bench.block + 3), unique("run")
    for seed in (1, 2, 3):
        if seed != bench.seed:
            await bench.serve(seed)
        salt, before = salt_of(run, 1, bench.version.step), bench.engine.load()
        assert await cached_at(bench, prompt, salt) == 0
        computed = bench.engine.load()
        assert computed.prefilled_tokens - before.prefilled_tokens == len(prompt) - 1
        assert await cached_at(bench, prompt, salt) == 2 * bench.block
        hit = bench.engine.load()
        assert hit.prefilled_tokens - computed.prefilled_tokens == len(prompt) - 1 - 2 * bench.block
        assert hit.prefix_hit_tokens - computed.prefix_hit_tokens == 2 * bench.block


async def test_tokens_of_a_new_version_are_a_fresh_engines(bench: Bench, build: Factory):
    prompt, run = prompt_of(2 * bench.block + 3), unique("run")
    old = await bench.greedy(prompt, 16, salt=salt_of(run, 1, 1))
    await bench.serve(2)
    new = await bench.greedy(prompt, 16, salt=salt_of(run, 1, 2))
    again = await bench.greedy(prompt, 16, salt=salt_of(run, 1, 2))
    async with build(seed=2) as fresh:
        expected = await fresh.greedy(prompt, 16)
    assert new == again == expected
    assert new != old
    bench.oracle.assert_greedy(prompt, new, bench.kind.tolerance)


async def test_a_rollout_that_crosses_an_update_keeps_its_prefix(bench: Bench):
    prompt, salt = prompt_of(2 * bench.block + 3), unique("salt")
    dispatched, decoded = bench.version, bench.engine.load().decoded_tokens
    running = asyncio.create_task(bench.ask(prompt, salt=salt, max_new_tokens=120))
    await bench.decoding(2, decoded)
    with bench.between_steps():
        crossed = await bench.serve(2)
    (first,) = await running
    assert set(first.versions) == {dispatched, crossed}
    assert first.versions == sorted(first.versions)
    before = bench.engine.load().prefilled_tokens
    (second,) = await bench.ask([*prompt, *first.token_ids], salt=salt)
    assert bench.engine.capabilities.keeps_kv_over_updates == (second.cached_token_count >= 2 * bench.block)
    if bench.engine.capabilities.keeps_kv_over_updates:
        assert second.oldest == {dispatched}
        assert bench.engine.load().prefilled_tokens - before <= bench.block + len(first.token_ids) + 2
    assert set(second.versions) == {crossed}


async def test_two_runs_never_share(bench: Bench):
    prompt = prompt_of(2 * bench.block + 3)
    one, other = unique("run"), unique("run")
    assert await cached_at(bench, prompt, salt_of(one, 1, 0)) == 0
    assert await cached_at(bench, prompt, salt_of(other, 1, 0)) == 0
    assert await cached_at(bench, prompt, salt_of(one, 1, 0)) == 2 * bench.block


async def test_a_retrained_step_hits_nothing_of_the_dead_incarnation(bench: Bench, prefiller: Bench):
    prompt, run = prompt_of(2 * bench.block + 3), unique("run")
    for each in dict.fromkeys((bench, prefiller)):
        assert await cached_at(each, prompt, salt_of(run, 1, 51)) == 0
    await bench.serve(2)
    dead = await bench.greedy(prompt, 12, salt=salt_of(run, 1, 51))
    await bench.serve(3)
    assert await cached_at(bench, prompt, salt_of(run, 2, 51)) == 0
    retrained = await bench.greedy(prompt, 12, salt=salt_of(run, 2, 51))
    bench.oracle.assert_greedy(prompt, retrained, bench.kind.tolerance)
    assert retrained != dead
    if result := await prefiller.prefill(prefiller.prefill_request(prompt, salt_of(run, 2, 51))):
        assert result.cached_token_count == 0
        prefiller.engine.release_kv(result.transfer_id)


async def test_a_salt_that_ended_leaves_nothing_behind(bench: Bench):
    """What a running sample still reads is counted until it ends; where memory cannot be freed it goes on counting."""
    prompt, salt, other = prompt_of(2 * bench.block + 3), unique("salt"), unique("salt")
    block_bytes = bench.block * bench.engine.limits.kv_bytes_per_token
    await bench.ask(prompt, salt=other)
    before = bench.engine.load().dead_kv_bytes
    running = asyncio.create_task(bench.ask(prompt, salt=salt, max_new_tokens=150))
    await until(lambda: bench.engine.load().running_samples, "a running sample")
    bench.engine.end_salt(salt)
    await until(lambda: bench.engine.load().dead_kv_bytes - before >= 2 * block_bytes, "dead bytes")
    (sample,) = await running
    assert (len(sample.token_ids), sample.oldest) == (150, {bench.version})
    await bench.idle()
    forgets = bench.engine.capabilities.forgets_salts
    assert (bench.engine.load().dead_kv_bytes == before) == forgets
    assert await cached_at(bench, prompt, other) == 2 * bench.block
    if forgets:
        assert await cached_at(bench, prompt, salt) == 0
        bench.engine.end_salt(salt)
        bench.engine.end_salt(other)
        assert await cached_at(bench, prompt, other) == 0
        assert bench.engine.load().dead_kv_bytes == before
