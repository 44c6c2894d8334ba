"""Weight updates with requests in flight: nothing restarts, nothing is mixed up, a failure leaves no trace."""

from __future__ import annotations

import asyncio
import time
import zlib

import numpy as np
import pytest
import torch

from slipstream.common.errors import ProbeFailed, WeightsCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, PausedEngine
from slipstream.engine.worker.verification import Verification
from slipstream.weights.manifest import Manifest, Probe, describe_tensors
from tests.engine.bench import Bench, Finished, prompt_of, until
from tests.engine.oracle import SIZES, Oracle, crossing, near_tie, tensors
from tests.engine.test_agreement import rows_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


def checksum(name: str, array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


async def test_a_swap_between_steps_restarts_nothing(bench: Bench):
    before, decoded = bench.version, bench.engine.load().decoded_tokens
    request = bench.request(prompt_of(20), samples=8, max_new_tokens=100)
    running = asyncio.create_task(bench.run(request, flush_s=0.0))
    await bench.decoding(2 * 8, decoded)
    version = PolicyVersion(before.incarnation, before.step + 1)
    with bench.between_steps():
        report = await bench.engine.update(version, tensors(2), lambda paused: None)
    bench.version, bench.seed = version, 2
    assert (report.version, report.previous_version, report.in_flight_samples) == (version, before, 8)
    assert report.pause_s >= report.apply_s > 0
    for index, sample in enumerate(await running):
        assert len(sample.token_ids) == 100
        assert sample.versions == sorted(sample.versions)
        assert set(sample.versions) == {before, version}
        if request.capture_routes:
            shape = (100, SIZES.moe_layers, SIZES.top_k)
            assert bench.engine.routes(request.sample_ids[index]).rows.shape == shape
    assert bench.engine.version == version


async def test_updates_go_back_and_forth_without_a_trace(bench: Bench):
    prompt = prompt_of(40)
    sums = [await bench.engine.checksums(checksum)]
    answers = [await bench.greedy(prompt)]
    for seed in (2, 1, 2, 1):
        await bench.serve(seed)
        sums.append(await bench.engine.checksums(checksum))
        answers.append(await bench.greedy(prompt))
    assert sums[0] == sums[2] == sums[4] != sums[1]
    assert sums[1] == sums[3]
    assert answers[0] == answers[2] == answers[4] != answers[1]
    assert answers[1] == answers[3]
    assert sums[0].keys() == tensors(1).keys()


async def test_a_rejected_update_rolls_back_under_the_feet_of_what_runs(bench: Bench):
    before, prompt = await bench.engine.checksums(checksum), prompt_of(20)
    expected = await bench.greedy(prompt, 100)
    running = asyncio.create_task(bench.ask(prompt, temperature=0.0, max_new_tokens=100))
    await until(lambda: bench.engine.load().running_samples, "a running sample")
    rejected: list[str] = []

    def reject(paused) -> None:
        norm = paused.parameters()["model.norm.weight"]
        assert np.array_equal(norm, tensors(2)["model.norm.weight"].numpy())
        oracle = Oracle(2).forward(prompt).logprobs(prompt, 1)
        assert torch.tensor(paused.probe(prompt)) == pytest.approx(oracle, abs=bench.kind.tolerance)
        rejected.append("seen")
        raise ValueError("checksum differs")

    with pytest.raises(ValueError, match="checksum differs"):
        await bench.engine.update(PolicyVersion(9, 9), tensors(2), reject)
    assert rejected == ["seen"]
    assert bench.engine.version == bench.version
    assert await bench.engine.checksums(checksum) == before
    (sample,) = await running
    assert sample.token_ids == expected
    assert set(sample.versions) == {bench.version}


def compare_crossing(
    bench: Bench, request: DecodeRequest, index: int, sample: Finished, seeds: dict[PolicyVersion, int], figure
) -> None:
    """A sample is what an oracle makes of it that swaps its weights at the same tokens and keeps its KV.

    The first token is sampled where the last prompt token is; what new weights compute first is the last token sampled
    before them.
    """
    tokens, first = [*request.token_ids, *sample.token_ids], len(request.token_ids)
    assert sample.versions == sorted(sample.versions)
    seen = sorted(set(sample.versions))
    ends = [first - 1 + sample.versions.index(version) for version in seen[1:]]
    bounds = [(end, seeds[version]) for version, end in zip(seen, [*ends, len(tokens) - 1], strict=True)]
    live = crossing(tokens[:-1], bounds)
    rows = rows_of(bench, request, index) if request.capture_routes else None
    if rows is not None and live.margin >= near_tie():
        assert (np.sort(rows, -1) == np.sort(live.routes, -1)).all()
    elif live.margin < near_tie() and rows is None:
        return
    forward = live if rows is None else crossing(tokens[:-1], bounds, rows)
    temperature = request.sampling.temperature
    expected = forward.logprobs(tokens, first, temperature)
    error = float((torch.tensor(sample.logprobs) - expected).abs().max())
    figure("largest difference of log-probabilities over updates to the trainer's", error)
    assert error <= bench.kind.tolerance
    assert sample.oldest == {min(seeds)}
    if len(seen) > 1:  # the same tokens on one set of weights would be told apart
        alone = Oracle(1).forward(tokens).logprobs(tokens, first)
        assert float((torch.tensor(sample.logprobs) - alone).abs().max()) > 1e-2


async def test_what_is_in_flight_over_updates_equals_an_oracle_that_swaps_at_the_same_tokens(bench: Bench, figure):
    seeds = {bench.version: 1}
    prompts = [prompt_of(3 + 9 * index, seed=index) for index in range(6)]
    requests = [
        bench.request(prompt, samples=2, temperature=(1.0, 0.6)[index % 2], max_new_tokens=190)
        for index, prompt in enumerate(prompts)
    ]
    running = [asyncio.create_task(bench.run(request)) for request in requests]
    for seed in (2, 3):
        before = bench.engine.load().decoded_tokens
        await until(lambda before=before: bench.engine.load().decoded_tokens - before > 300, "some tokens of each")
        with bench.between_steps():
            seeds[await bench.serve(seed)] = seed
    answers = await asyncio.gather(*running)
    assert {version for samples in answers for sample in samples for version in sample.versions} >= set(list(seeds)[:2])
    for request, samples in zip(requests, answers, strict=True):
        for index, sample in enumerate(samples):
            compare_crossing(bench, request, index, sample, seeds, figure)


@pytest.mark.parametrize("off", [0.0, 1.0], ids=["a good probe", "a probe out of tolerance"])
async def test_no_token_of_new_weights_comes_before_their_verdict(bench: Bench, off):
    version = PolicyVersion(bench.version.incarnation, bench.version.step + 1)
    prompt = prompt_of(20)
    logprobs = Oracle(2).forward(prompt).logprobs(prompt, 1) + off
    slices, _ = describe_tensors({name: tensor.numpy() for name, tensor in tensors(2).items()})
    verify = Verification(
        Manifest(version, slices, Probe(tuple(prompt), tuple(logprobs.tolist()), max(1e-3, bench.kind.tolerance)))
    )
    decoded: list[int] = []

    def verdict(paused: PausedEngine) -> None:
        decoded.append(bench.engine.load().decoded_tokens)
        time.sleep(0.2)  # tokens would come
        decoded.append(bench.engine.load().decoded_tokens)
        verify(paused)
        verdicts.append(version)

    verdicts: list[PolicyVersion] = []
    versions: list[PolicyVersion] = []

    async def listen() -> None:
        # As many as run at once: the probe finds a place beside them.
        samples = bench.engine.limits.max_running_samples
        request = bench.request(prompt_of(9), samples=samples, max_new_tokens=100)
        async for chunk in bench.engine.decode(request, flush_s=0.0):
            versions.extend(sampler for _, sampler in chunk.versions)
            assert version not in versions or verdicts, "a token came before the verdict"

    listening = asyncio.create_task(listen())
    await until(lambda: versions, "tokens")
    if off:
        with pytest.raises(ProbeFailed):
            await bench.engine.update(version, tensors(2), verdict)
    else:
        await bench.engine.update(version, tensors(2), verdict)
        bench.version, bench.seed = version, 2
    await listening
    assert verify.slice_count == len(slices)
    assert decoded[0] == decoded[1]
    assert versions[-1] == bench.version == bench.engine.version
    assert (version in versions) == (not off)


@pytest.mark.parametrize("fault", ["missing", "shape", "doubled", "not a number", "infinite"])
async def test_weights_that_do_not_fit_are_refused_before_the_engine_is_touched(bench: Bench, fault):
    before, wrong = await bench.engine.checksums(checksum), tensors(2)
    if fault == "missing":
        del wrong["model.norm.weight"]
    elif fault == "shape":
        wrong["lm_head.weight"] = wrong["lm_head.weight"][:-1]
    elif fault == "doubled":
        wrong["model.layers.9.norm.weight"] = wrong["model.norm.weight"]
    else:
        name = "model.layers.1.mlp.experts.7.down_proj.weight"
        wrong[name][3, 4] = torch.nan if fault == "not a number" else torch.inf
    seen: list[PausedEngine] = []
    running = asyncio.create_task(bench.ask(prompt_of(20), max_new_tokens=60))
    await until(lambda: bench.engine.load().running_samples, "a running sample")
    with pytest.raises(WeightsCorrupt, match=r"do not match|has shape|no numbers"):
        await bench.engine.update(PolicyVersion(9, 9), wrong, seen.append)
    assert not seen, "the engine paused"
    assert set((await running)[0].versions) == {bench.version}
    assert bench.engine.version == bench.version
    assert await bench.engine.checksums(checksum) == before
    await bench.serve(2)  # the next good one works
    bench.oracle.assert_greedy(prompt_of(20), await bench.greedy(prompt_of(20)), bench.kind.tolerance)


async def test_late_members_of_a_group_keep_its_salt_over_two_updates(bench: Bench, prefiller: Bench):
    """The decode pool updates first, so that KV is never newer than its sampler."""
    prompt, run = prompt_of(2 * bench.block + 3), f"run-{bench.version.step}"

    async def member(dispatched: PolicyVersion, expect_cached: int):
        job = prefiller.prefill_request(prompt, f"{run}/{dispatched}")
        result = await prefiller.prefill(job)
        if result is None:  # the decode engine computes prompts itself
            (sample,) = await bench.ask(prompt, salt=job.salt, temperature=0.0)
            assert sample.cached_token_count == expect_cached
            return sample
        assert result.cached_token_count == expect_cached
        kv = await bench.kind.transfer(prefiller.engine, result.transfer_id)
        (sample,) = await bench.ask(prompt, salt=job.salt, kv=kv, temperature=0.0)
        prefiller.engine.release_kv(result.transfer_id)
        return sample

    pools = dict.fromkeys((bench, prefiller))
    prefiller.version = bench.version = max(prefiller.version, bench.version)
    for each in pools:
        await each.serve(1)
    first = bench.version
    await member(first, 0)
    for seed in (2, 3):
        for each in pools:
            await each.serve(seed)
        fresh = await member(bench.version, 0)
        assert fresh.oldest == {bench.version}
        bench.oracle.assert_greedy(prompt, fresh.token_ids, bench.kind.tolerance)
        late = await member(first, 2 * bench.block)
        assert late.oldest == {first}
        assert set(late.versions) == {bench.version}
