"""The experts recorded for every position are those that computed it first, as an oracle chooses them; or unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from slipstream.common.errors import RequestIdReused, RoutesUnknown
from slipstream.engine.base import DecodeRequest
from slipstream.engine.routes import RouteRows
from tests.engine.bench import Bench, Finished, prompt_of, unique, until
from tests.engine.engines import CHUNK_TOKENS
from tests.engine.oracle import Forward, crossing, near_tie
from tests.engine.test_agreement import rows_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


def agreed(rows: np.ndarray, oracle: Forward) -> np.ndarray:
    """At which positions these are the oracle's experts, in any order. Near-ties are no evidence either way."""
    equal = (np.sort(rows, -1) == np.sort(oracle.routes[: len(rows)], -1)).all((1, 2))
    return equal | (oracle.margin < near_tie())


def same(rows: np.ndarray, oracle: Forward) -> bool:
    return bool(agreed(rows, oracle).all())


def likely_cuts(end: int, size: int) -> Iterator[int]:
    """Where a prompt may have been cut: at multiples of a size rather than elsewhere."""
    yield from range(0, end + 1, size)
    yield from (cut for cut in range(end + 1) if cut % size)


def expect_none(bench: Bench, request: DecodeRequest) -> bool:
    """For engines that capture none: they keep none."""
    if bench.engine.capabilities.captures_routes:
        return False
    for key in (request.request_id, *request.sample_ids):
        with pytest.raises(RoutesUnknown):
            bench.engine.routes(key)
    return True


def tokens_of(request: DecodeRequest, sample: Finished) -> list[int]:
    return [*request.token_ids, *sample.token_ids]


async def test_turns_that_hit_the_cache_have_the_rows_of_all_their_positions(bench: Bench):
    """Chunked, too: the prompts are longer than what is computed in a step."""
    prompt, salt = prompt_of(2 * CHUNK_TOKENS + 5), unique("salt")
    for turn in range(3):
        request = bench.request(prompt, samples=2, salt=salt, max_new_tokens=16)
        samples = await bench.run(request)
        if expect_none(bench, request):
            return
        assert (samples[0].cached_token_count > 0) == (turn > 0)
        for index, sample in enumerate(samples):
            rows = rows_of(bench, request, index)
            tokens = tokens_of(request, sample)
            assert len(rows) == len(tokens) - 1, "the last token of a turn has no row until the next one"
            assert same(rows, bench.oracle.forward(tokens))
        prompt = [*prompt, *samples[0].token_ids, *prompt_of(9, seed=turn)]


async def test_a_later_turn_finds_what_the_turn_before_sampled(bench: Bench):
    block = bench.block
    prompt, salt = prompt_of(block + 3), unique("salt")
    (answer,) = await bench.ask(prompt, salt=salt, max_new_tokens=3 * block)
    told = [*prompt, *answer.token_ids]
    (later,) = await bench.ask([*told, *prompt_of(5, seed=1)], salt=salt, max_new_tokens=4)
    assert later.cached_token_count == (len(told) - 1) // block * block
    assert later.token_ids == (await bench.ask([*told, *prompt_of(5, seed=1)], max_new_tokens=4))[0].token_ids


async def test_rows_that_an_earlier_turn_has_are_not_recorded_again(bench: Bench):
    prompt, salt = prompt_of(2 * bench.block + 5), unique("salt")
    (answer,) = await bench.ask(prompt, salt=salt, max_new_tokens=16)
    told = len(prompt) + 15
    later = [*prompt, *answer.token_ids, *prompt_of(9, seed=1)]
    request = bench.request(later, salt=salt, first_route_position=told)
    (sample,) = await bench.run(request)
    if expect_none(bench, request):
        return
    routes = bench.engine.routes(request.request_id)
    assert (routes.first_position, routes.end, routes.unknown_ranges) == (told, len(later) - 1, ())
    oracle = bench.oracle.forward(tokens_of(request, sample))
    assert (
        oracle.margin < near_tie() or (np.sort(routes.rows, -1) == np.sort(oracle.routes[told : routes.end], -1)).all()
    )


async def test_an_update_between_the_parts_of_a_prompt_shows_in_its_rows(bench: Bench):
    """Where the swap came the engine need not say, only that there is older KV: so any cut between two parts may be."""
    old = bench.seed
    for attempt in range(4):
        new = 3 - old
        request = bench.request(prompt_of(200, seed=attempt), samples=2, max_new_tokens=30)
        dispatched = bench.version
        running = asyncio.create_task(bench.run(request))
        await asyncio.sleep(0.004 * attempt)
        version = await bench.serve(new)
        samples = await running
        if expect_none(bench, request):
            return
        for index, sample in enumerate(samples):
            tokens, first = tokens_of(request, sample), len(request.token_ids)
            before = sample.versions.count(dispatched)
            cuts = [first - 1 + before] if before else likely_cuts(first - 1, CHUNK_TOKENS)
            if sample.oldest == {version}:
                cuts = [0]
            rows = rows_of(bench, request, index)
            oracles = (crossing(tokens[:-1], [(cut, old), (len(tokens) - 1, new)]) for cut in cuts)
            assert any(same(rows, oracle) for oracle in oracles)
        old = new


def first_time(bench: Bench, tokens: list[int], rows: np.ndarray, cut: int, recomputed_from: int | None) -> np.ndarray:
    """Which rows are those that computed their positions first: up to `cut` by weights 1, from there on by weights 2.

    From some position on they rest on KV that was computed once more, but for a part that was still cached: it begins
    where the engine says, or later where that was before the update.
    """
    kept = agreed(rows, crossing(tokens[:-1], [(cut, 1), (len(tokens) - 1, 2)]))
    assert kept[:cut].all(), "a row was replaced by one of newer weights"
    if recomputed_from is None:
        return kept
    firsts = np.minimum.accumulate(kept)
    hits = (hit for hit in likely_cuts(cut, bench.block) if hit >= min(recomputed_from, cut))
    oracles = (crossing(tokens[:-1], [(hit, 1), (len(tokens) - 1, 2)]) for hit in hits)
    explained = (firsts | np.minimum.accumulate(agreed(rows, oracle)[::-1])[::-1] for oracle in oracles)
    return next((rows for rows in explained if rows.all()), firsts)


async def crowd(bench: Bench, requests: list[DecodeRequest]) -> list[Finished]:
    """Run requests that need more blocks than there are, and change the weights when nearly all are taken."""
    before = bench.engine.load().preemptions
    running = [asyncio.create_task(bench.run(request)) for request in requests]
    await until(lambda: bench.engine.load().tokens_in_flight > 400, "a pool that is nearly full")
    await bench.serve(2)
    answers = [sample for (sample,) in await asyncio.gather(*running)]
    assert (bench.engine.load().preemptions > before) == bench.engine.capabilities.preempts
    assert {len(sample.token_ids) for sample in answers} == {200}
    return answers


def told(bench: Bench, requests: list[DecodeRequest]) -> list[int | None]:
    """From where on engines say that they computed samples once more; some of them, where they preempt at all."""
    starts = [bench.engine.routes(request.sample_ids[0]).recomputed_from for request in requests]
    assert any(start is not None for start in starts) == bench.engine.capabilities.preempts
    return starts


async def test_a_preempted_sample_keeps_the_rows_of_the_first_time(small: Bench):
    """Samples need more blocks than there are; and the weights change meanwhile, so that rows computed later differ."""
    requests = [small.request(prompt_of(20 + index, seed=index), max_new_tokens=200) for index in range(4)]
    dispatched = small.version
    answers = await crowd(small, requests)
    if expect_none(small, requests[0]):
        return
    for request, sample, start in zip(requests, answers, told(small, requests), strict=True):
        tokens, before = tokens_of(request, sample), sample.versions.count(dispatched)
        cut = len(request.token_ids) - 1 + before if before else 0
        assert first_time(small, tokens, rows_of(small, request, 0), cut, start).all()


async def test_samples_of_prompts_from_elsewhere_are_preempted_and_keep_the_rows_of_both(
    small: Bench, prefiller: Bench
):
    """Prompts computed there and transferred, then computed once more here, by newer weights: the rows are from there.

    Samples' own rows are those of the first time, too, and both together have one for each position.
    """
    requests, held, prompt_rows = [], [], []
    for index in range(4):
        prompt, salt = prompt_of(small.block + 5 + index, seed=index), unique("salt")
        result = await prefiller.prefill(prefiller.prefill_request(prompt, salt))
        if result is None:  # it serves in no prefill pool, and said so
            return
        held.append(result.transfer_id)
        kv = await small.kind.transfer(prefiller.engine, result.transfer_id)
        if small.engine.capabilities.captures_routes:
            prompt_rows.append(prefiller.engine.routes(result.transfer_id).rows)
        requests.append(small.request(prompt, salt=salt, kv=kv, max_new_tokens=200))
    dispatched = small.version
    answers = await crowd(small, requests)
    for transfer_id in held:
        prefiller.engine.release_kv(transfer_id)
    if expect_none(small, requests[0]):
        return
    for request, sample, rows, start in zip(requests, answers, prompt_rows, told(small, requests), strict=True):
        tokens, before = tokens_of(request, sample), sample.versions.count(dispatched)
        rows = rows_of(small, request, 0, rows)
        assert len(rows) == len(tokens) - 1
        assert first_time(small, tokens, rows, len(request.token_ids) - 1 + before, start).all()


async def test_kv_from_elsewhere_serves_its_own_rollout_and_others_compute_it_for_its_routes(
    bench: Bench, prefiller: Bench
):
    """It brings no rows; its rollout has them from where it was computed, and nobody else would have any."""
    prompt, salt = prompt_of(2 * bench.block + 5), unique("salt")
    result = await prefiller.prefill(prefiller.prefill_request(prompt, salt))
    if result is None:  # all KV of such an engine is its own
        return
    kv = await bench.kind.transfer(prefiller.engine, result.transfer_id)
    (answer,) = await bench.ask(prompt, salt=salt, kv=kv, max_new_tokens=4)
    prefiller.engine.release_kv(result.transfer_id)
    told = len(prompt) + len(answer.token_ids) - 1
    later = bench.request(
        [*prompt, *answer.token_ids, *prompt_of(9, seed=1)], salt=salt, first_route_position=told, max_new_tokens=4
    )
    (sample,) = await bench.run(later)
    if expect_none(bench, later):
        return
    assert sample.cached_token_count >= 2 * bench.block
    routes: RouteRows = bench.engine.routes(later.request_id)
    assert (routes.first_position, routes.unknown_ranges) == (told, ())
    cached = []
    for number in range(2):
        other = bench.request([*prompt[: 2 * bench.block], *prompt_of(7, seed=2 + number)], samples=2, salt=salt)
        samples = await bench.run(other)
        cached.append(samples[0].cached_token_count)
        for index, each in enumerate(samples):
            rows = rows_of(bench, other, index)
            assert len(rows) == len(tokens_of(other, each)) - 1
            assert same(rows, bench.oracle.forward(tokens_of(other, each)))
    assert cached == [0, 2 * bench.block], "computed once more, and then found"
    (sample,) = await bench.run(replace(later, request_id=unique("again"), sample_ids=(unique("again"),)))
    assert sample.cached_token_count >= 2 * bench.block


async def test_rows_of_two_requests_never_meet_under_one_key(bench: Bench):
    engine = bench.engine
    if not engine.capabilities.captures_routes:
        return
    first = bench.request(prompt_of(20, seed=1), 2, max_new_tokens=100)
    running = asyncio.create_task(bench.run(first))
    await until(lambda: engine.load().running_samples == 2, "two running samples")
    second = replace(bench.request(prompt_of(31, seed=2), 2), sample_ids=(unique("other"), first.sample_ids[1]))
    with bench.between_steps(), pytest.raises(RequestIdReused) as refused:  # its rows are on their way
        await bench.run(second)
    assert refused.value.metadata["request_id"] == first.sample_ids[1]
    await running
    with pytest.raises(RequestIdReused):  # they are there
        await bench.run(second)
    with pytest.raises(RequestIdReused):  # so are those of its prompt
        await bench.run(replace(second, request_id=first.request_id, sample_ids=(unique("other"),)))
    assert engine.release_routes(first.sample_ids[1])
    samples = await bench.run(second)
    tokens = [*second.token_ids, *samples[1].token_ids]
    rows, live = engine.routes(first.sample_ids[1]), bench.oracle.forward(tokens)
    assert (rows.first_position, rows.end) == (30, len(tokens) - 1)
    equal = (np.sort(rows.rows, -1) == np.sort(live.routes[30:-1], -1)).all((1, 2))
    assert (equal | (live.margin < near_tie())).all()


async def test_what_was_sampled_before_an_abort_has_its_rows(bench: Bench):
    """Whoever ends a turn early, for what it says, keeps its tokens; and the prompt's rows are there as ever."""
    request = bench.request(prompt_of(21), samples=2, max_new_tokens=200)
    samples = [Finished(), Finished()]
    aborting: list[asyncio.Task[int]] = []
    async with asyncio.timeout(60):
        async for chunk in bench.engine.decode(request, flush_s=0.01):
            samples[chunk.sample_index].add(chunk)
            if not aborting and all(len(sample.token_ids) >= 5 for sample in samples):
                aborting.append(asyncio.create_task(bench.engine.abort(request.request_id)))
    assert await aborting[0] == 2, "it was let run to its end"
    assert {sample.finish_reason for sample in samples} == {"aborted"}
    if expect_none(bench, request):
        return
    for index, sample in enumerate(samples):
        own = bench.engine.routes(request.sample_ids[index])
        tokens = tokens_of(request, sample)
        assert (own.first_position, own.end, own.unknown_ranges) == (20, len(tokens) - 1, ())
        assert same(rows_of(bench, request, index), bench.oracle.forward(tokens))
