"""What a transfer must not change: routes, versions, and the engine that lives on when the other one dies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.common.errors import KvMismatch, KvTransferFailed, KvUnknown, Unsupported
from slipstream.engine.base import FRAMES, KvPayload, KvReference
from tests.engine import oracle
from tests.engine.bench import Bench, Factory, prompt_of, unique, until
from tests.engine.engines import TRANSFER_TIMEOUT_S, Vllm
from tests.engine.oracle import crossing, near_tie
from tests.engine.peer import Peer
from tests.engine.test_agreement import rows_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def handed_over(bench: Bench, prefiller: Bench, prompt: list[int], salt: str) -> KvPayload | KvReference:
    """A prompt's KV, on its way; whoever gets it releases the prefill of the name `salt`."""
    job = replace(prefiller.prefill_request(prompt, salt), request_id=salt)
    await prefiller.engine.prefill(job)
    return await bench.kind.transfer(prefiller.engine, salt)


def same_experts(rows: np.ndarray, expected: np.ndarray) -> bool:
    """Without near-ties the same; two bytes make near-ties of a few, and rows of other tokens would differ in most."""
    same = (np.sort(rows, -1) == np.sort(expected, -1)).all(-1).mean()
    return bool(same == 1.0 if oracle.kept_dtype == torch.float32 else same > 0.9)


async def test_routes_of_what_came_from_elsewhere_are_unknown_here_and_known_there(bench: Bench, prefiller: Bench):
    """The next turn finds in the cache what the first had transferred, and has its rows from the prefiller."""
    prompt, salt = prompt_of(2 * bench.block + 9, seed=3), unique("salt")
    for number in range(8):  # blocks that held the rows of others
        await bench.ask(prompt_of(3 * bench.block, seed=50 + number), max_new_tokens=2)
    kv = await handed_over(bench, prefiller, prompt, salt)
    (first,) = await bench.ask(prompt, kv=kv, salt=salt, temperature=0.0, max_new_tokens=bench.block)
    there = prefiller.engine.routes(salt)
    prefiller.engine.release_kv(salt)
    assert (there.first_position, there.end, there.unknown_ranges) == (0, len(prompt) - 1, ())
    request = bench.request([*prompt, *first.token_ids, 1, 2, 3], salt=salt, first_route_position=len(prompt) - 1)
    (second,) = await bench.run(request)
    here = bench.engine.routes(request.request_id)
    assert second.cached_token_count >= 2 * bench.block
    assert (here.first_position, here.unknown_ranges) == (len(prompt) - 1, ())
    live = bench.oracle.forward([*request.token_ids, *second.token_ids])
    assert live.margin > near_tie() or oracle.kept_dtype != torch.float32
    for rows in (there, here):
        known = rows.known()
        expected = live.routes[rows.first_position : rows.end]
        assert same_experts(rows.rows[known], expected[known])


async def test_prefills_that_hit_the_cache_and_are_cut_have_the_oracles_routes(prefiller: Bench):
    prompt, salt = prompt_of(200, seed=4), unique("salt")
    jobs = [prefiller.prefill_request(prompt[:count], salt) for count in (2 * prefiller.block + 3, 200)]
    live = prefiller.oracle.forward(prompt)
    assert live.margin > near_tie() or oracle.kept_dtype != torch.float32
    for job, cached in zip(jobs, (0, 2 * prefiller.block), strict=True):
        result = await prefiller.engine.prefill(job)
        assert result.cached_token_count == cached
        rows = prefiller.engine.routes(job.request_id)
        assert (rows.first_position, rows.end, rows.unknown_ranges) == (0, len(job.token_ids) - 1, ())
        assert same_experts(rows.rows, live.routes[: rows.end])
        assert prefiller.engine.release_kv(job.request_id)


async def test_a_prompt_handed_over_and_an_update_in_mid_flight_equal_an_oracle_that_swaps(
    bench: Bench, prefiller: Bench, figure
):
    """The prompt by weights 1 elsewhere, some tokens by weights 1 here, the rest by weights 2 on the same KV."""
    prompt, salt = prompt_of(bench.block + 7, seed=5), unique("salt")
    kv = await handed_over(bench, prefiller, prompt, salt)
    request = bench.request(prompt, 6, salt=salt, kv=kv, max_new_tokens=200)
    first_version, prompt_rows = bench.version, prefiller.engine.routes(salt).rows
    oldest = min(first_version, prefiller.version)  # the two were updated apart
    running = asyncio.create_task(bench.run(request))
    # The others wait for the first one's transfer, which may be some tokens ahead by then.
    await until(lambda: bench.engine.load().running_samples == 6, "all samples")
    before = bench.engine.load().decoded_tokens
    await until(lambda: bench.engine.load().decoded_tokens - before > 12, "some tokens of each")
    with bench.between_steps():
        second_version = await bench.serve(2)
    samples = await running
    prefiller.engine.release_kv(salt)
    for index, sample in enumerate(samples):
        tokens = [*prompt, *sample.token_ids]
        assert set(sample.versions) == {first_version, second_version}
        assert sample.oldest == {oldest}
        swapped = len(prompt) - 1 + sample.versions.index(second_version)
        bounds = [(swapped, 1), (len(tokens) - 1, 2)]
        rows = rows_of(bench, request, index, prompt_rows)
        live = crossing(tokens[:-1], bounds)
        assert live.margin < near_tie() or (np.sort(rows, -1) == np.sort(live.routes, -1)).all()
        expected = crossing(tokens[:-1], bounds, rows).logprobs(tokens, len(prompt))
        error = float((torch.tensor(sample.logprobs) - expected).abs().max())
        figure("largest difference of log-probabilities over a transfer and an update", error)
        assert error <= bench.kind.tolerance


async def test_kv_is_leased_once_and_read_in_time_or_not_at_all(bench: Bench, prefiller: Bench):
    salt, prompt = unique("salt"), prompt_of(bench.block + 3)
    kv = await handed_over(bench, prefiller, prompt, salt)
    if not isinstance(kv, KvReference):
        with pytest.raises(Unsupported):
            prefiller.engine.lease_kv(salt)
        assert prefiller.engine.release_kv(salt)
        return
    with pytest.raises(KvUnknown):
        prefiller.engine.lease_kv(salt)  # a second taker could read what the first one's reading had freed
    for wrong in (replace(kv, token_count=3), replace(kv, params=b"[]")):
        with pytest.raises(KvMismatch):
            await bench.ask(prompt, kv=wrong)
    with pytest.raises(KvTransferFailed):
        await bench.ask(prompt, kv=replace(kv, lease_s=0.0))
    assert prefiller.engine.release_kv(salt)
    with pytest.raises(KvUnknown):
        prefiller.engine.lease_kv(salt)


async def fails(bench: Bench, prompt: list[int], kv: KvReference) -> float:
    """Decode with KV that cannot come; returns how long it took to say so."""
    started_s = time.monotonic()
    with pytest.raises(KvTransferFailed):
        await bench.ask(prompt, 2, kv=kv)
    return time.monotonic() - started_s


@pytest.mark.timeout(280)
async def test_death_of_the_prefill_engine_before_during_and_after_a_transfer(
    bench: Bench, build: Factory, figure, monkeypatch: pytest.MonkeyPatch
):
    """By kill -9, in a process of its own. Nothing leaks, the decode engine goes on, and a new life is not the old.

    KV comes over TCP, as between two hosts: memory of the same host is read without the peer, frozen or not.
    """
    if FRAMES in bench.engine.capabilities.kv_transports:
        return  # bytes come through the worker: tests/fault/test_prefill_deaths.py
    assert isinstance(build.kind, Vllm)
    if build.kind.device == "cpu":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with build() as own:
        await prefill_engine_dies(own, build, figure)


async def prefill_engine_dies(bench: Bench, build: Factory, figure) -> None:
    assert isinstance(build.kind, Vllm)
    prompts = [prompt_of(200, seed=60 + number) for number in range(5)]
    expected = await bench.greedy(prompts[0], 50)
    async with Peer(build.model_dir, build.kind) as peer:
        after = bench.request(prompts[0], kv=await peer.prefill(prompts[0]), temperature=0.0, max_new_tokens=50)
        stream = bench.engine.decode_batches(after, flush_s=0.0)
        answer = [token for chunk in await anext(stream) for token in chunk.token_ids]  # the transfer is over
        frozen, during, before, stale = [await peer.prefill(prompt) for prompt in prompts[1:]]
        peer.freeze()
        took_s = await fails(bench, prompts[1], frozen)
        assert TRANSFER_TIMEOUT_S - 1 < took_s < TRANSFER_TIMEOUT_S + 30  # its lease has a minute
        failing = asyncio.create_task(fails(bench, prompts[2], during))
        await asyncio.sleep(TRANSFER_TIMEOUT_S / 4)
        assert not failing.done()
        peer.kill()
        figure("seconds from a prefill engine's death to the end of its transfer", await failing)
        figure("seconds until a dead prefill engine is noticed", await fails(bench, prompts[3], before))
        async for chunks in stream:
            answer += [token for chunk in chunks for token in chunk.token_ids]
        assert answer == expected
    assert await bench.greedy(prompts[0], 50) == expected
    await bench.idle()
    async with Peer(build.model_dir, build.kind, peer.port) as again:  # at the same address
        await fails(bench, prompts[4], stale)
        kv = await again.prefill(prompts[4])
        assert kv.params != stale.params
        (sample,) = await bench.ask(prompts[4], kv=kv, temperature=0.0, max_new_tokens=8)
        assert sample.cached_token_count == 199
        assert sample.token_ids == await bench.greedy(prompts[4], 8)
