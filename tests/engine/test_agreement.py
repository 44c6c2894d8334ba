"""The engine's log-probabilities are those of the trainer's model for the same weights and tokens.

Routes are replayed where the engine captures them; else the oracle routes live, and a position at which rounding could
have chosen another expert makes the comparison void: those are counted apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from slipstream.common.errors import RoutesUnknown
from slipstream.engine.base import DecodeRequest
from tests.engine.bench import Bench, Factory, Finished, prompt_of, unique
from tests.engine.engines import Embedded
from tests.engine.oracle import SIZES, near_tie

pytestmark = pytest.mark.asyncio(loop_scope="session")


def rows_of(bench: Bench, request: DecodeRequest, index: int, prompt_rows: np.ndarray | None = None) -> np.ndarray:
    """Routes of all positions that were computed for a sample: the prompt's, then its own."""
    own = bench.engine.routes(request.sample_ids[index])
    if prompt_rows is None:
        prompt_rows = bench.engine.routes(request.request_id).rows
    assert own.first_position == len(request.token_ids) - 1 == len(prompt_rows)
    assert own.unknown_ranges == ()
    rows = np.concatenate([prompt_rows, own.rows])
    assert rows.dtype == np.uint8
    assert rows.shape[1:] == (SIZES.moe_layers, SIZES.top_k)
    return rows


def compare(bench: Bench, request: DecodeRequest, samples: Sequence[Finished], figure) -> None:
    """Assert agreement, and that captured routes are those of the oracle but for near-ties."""
    flips = 0
    for index, sample in enumerate(samples):
        tokens = [*request.token_ids, *sample.token_ids]
        rows = rows_of(bench, request, index) if request.capture_routes else None
        live = bench.oracle.forward(tokens)
        if rows is not None:
            assert len(rows) == len(tokens) - 1
            flipped = (np.sort(rows, -1) != np.sort(live.routes[:-1], -1)).any()
            assert not flipped or live.margin < near_tie(), "routes differ and no two experts were close"
            flips += int(flipped)
        elif live.margin < near_tie():
            flips += 1
            continue
        error = bench.error_of(request.token_ids, sample, rows, request.sampling.temperature)
        figure("largest difference of log-probabilities to the trainer's", error)
        assert error <= bench.kind.tolerance
        assert set(sample.versions) == sample.oldest == {bench.version}
    figure("sequences with a near-tie in routing", flips)


@pytest.mark.parametrize("length", [1, 7, 70, 220])
async def test_sampled_logprobs_equal_a_full_forward(bench: Bench, figure, length):
    request = bench.request(prompt_of(length), samples=6, max_new_tokens=24)
    compare(bench, request, await bench.run(request), figure)


async def test_logprobs_after_a_prefix_hit_equal_a_full_forward(bench: Bench, figure):
    prompt, salt = prompt_of(2 * bench.block + 5), unique("salt")
    await bench.ask(prompt, salt=salt)
    request = bench.request([*prompt, *prompt_of(bench.block, seed=3)], samples=3, salt=salt, max_new_tokens=24)
    samples = await bench.run(request)
    assert samples[0].cached_token_count == 2 * bench.block
    compare(bench, request, samples, figure)


async def test_logprobs_in_a_mixed_batch_equal_a_full_forward(bench: Bench, figure):
    """Prompts come while others decode, at other temperatures, of other lengths."""
    prompts = [prompt_of(3 + 17 * index, seed=index) for index in range(8)]
    requests = [
        bench.request(prompt, samples=2, temperature=(1.0, 0.6, 0.0, 2.0)[index % 4], max_new_tokens=10 + 5 * index)
        for index, prompt in enumerate(prompts)
    ]

    async def later(request: DecodeRequest, pause_s: float) -> list[Finished]:
        await asyncio.sleep(pause_s)
        return await bench.run(request)

    answers = await asyncio.gather(*(later(request, 0.01 * index) for index, request in enumerate(requests)))
    for request, samples in zip(requests, answers, strict=True):
        compare(bench, request, samples, figure)


async def test_logprobs_after_a_transfer_equal_a_full_forward(bench: Bench, prefiller: Bench, figure):
    """The prompt's routes come from the prefill engine, the rest from the decode engine."""
    prompt = prompt_of(2 * bench.block + 5)
    result = await prefiller.prefill(job := prefiller.prefill_request(prompt))
    if result is None:
        return
    kv = await bench.kind.transfer(prefiller.engine, result.transfer_id)
    request = bench.request(prompt, samples=3, kv=kv, max_new_tokens=16)
    samples = await bench.run(request)
    rows = None
    if job.capture_routes:
        prompt_routes = prefiller.engine.routes(job.request_id)
        assert (prompt_routes.first_position, prompt_routes.unknown_ranges) == (0, ())
        with pytest.raises(RoutesUnknown):
            bench.engine.routes(request.request_id)
        rows = prompt_routes.rows
    prefiller.engine.release_kv(result.transfer_id)
    for index, sample in enumerate(samples):
        replayed = rows_of(bench, request, index, rows) if rows is not None else None
        error = bench.error_of(prompt, sample, replayed, 1.0)
        figure("largest difference of log-probabilities to the trainer's", error)
        assert error <= bench.kind.tolerance


async def test_a_probe_equals_a_full_forward_and_neither_reads_nor_writes_the_cache(bench: Bench, figure):
    prompt, salt = prompt_of(2 * bench.block + 5), unique("salt")
    probed = Finished()
    probed.token_ids, probed.logprobs = prompt[1:], await bench.engine.probe(prompt, salt)
    (sample,) = await bench.ask(prompt, salt=salt)
    assert sample.cached_token_count == 0
    error = bench.error_of(prompt[:1], probed, None, 1.0)
    figure("largest difference of the probe to the trainer's", error)
    assert error <= bench.kind.tolerance
    assert await bench.engine.probe(prompt, salt) == pytest.approx(probed.logprobs, abs=bench.kind.tolerance)


async def test_logprobs_equal_those_of_the_embedded_engine(bench: Bench, model_dir: Path, figure):
    """The reference engine, on the same weights and tokens; it routes live, so near-ties are left out."""
    embedded = Factory(Embedded(), model_dir)
    async with embedded(seed=bench.seed) as reference:
        for length in (7, 70, 200):
            prompt = prompt_of(length, seed=4)
            for sample in await bench.ask(prompt, 6, max_new_tokens=40):
                tokens = [*prompt, *sample.token_ids]
                if bench.oracle.forward(tokens).margin < near_tie():
                    continue
                expected = await reference.engine.probe(tokens, unique("salt"))
                error = np.abs(np.array(sample.logprobs) - expected[length - 1 :]).max()
                figure("largest difference of log-probabilities to the embedded engine's", float(error))
                assert error <= bench.kind.tolerance
