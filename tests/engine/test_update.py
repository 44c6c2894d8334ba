"""Weight updates with requests in flight: nothing restarts, nothing is mixed up, a failure leaves no trace."""

from __future__ import annotations

import asyncio
import zlib

import numpy as np
import pytest
import torch

from slipstream.common.version import PolicyVersion
from tests.engine.bench import Bench, prompt_of, until
from tests.engine.oracle import SIZES, Oracle, tensors

pytestmark = pytest.mark.asyncio(loop_scope="session")


def checksum(name: str, array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


async def test_a_swap_between_steps_restarts_nothing(bench: Bench):
    before = bench.version
    request = bench.request(prompt_of(20), samples=8, max_new_tokens=100)
    running = asyncio.create_task(bench.run(request, flush_s=0.0))
    await until(lambda: bench.engine.load().running_samples == 8, "running samples")
    version = PolicyVersion(before.incarnation, before.step + 1)
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


@pytest.mark.parametrize("fault", ["missing", "shape", "doubled"])
async def test_weights_that_do_not_fit_are_refused_whole(bench: Bench, fault):
    before, wrong = await bench.engine.checksums(checksum), tensors(2)
    if fault == "missing":
        del wrong["model.norm.weight"]
    elif fault == "shape":
        wrong["lm_head.weight"] = wrong["lm_head.weight"][:-1]
    else:
        wrong["model.layers.9.norm.weight"] = wrong["model.norm.weight"]
    with pytest.raises(ValueError, match=r"does not match|has shape"):
        await bench.engine.update(PolicyVersion(9, 9), wrong, lambda paused: None)
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
