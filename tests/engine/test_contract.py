"""The sampling contract: what the training ratio divides by is the probability that the token was drawn with."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
import torch

from slipstream.common.errors import SamplingBiased, Unsupported
from slipstream.common.version import PolicyVersion
from slipstream.engine.worker.prompts import UNKNOWN_LOGPROB, chunk_to_proto
from slipstream.engine.worker.telemetry import logprobs_unknown
from tests.engine.bench import Bench, Finished, prompt_of, unique
from tests.engine.oracle import tensors

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 1, "temperature": 0.6}], ids=str
)
async def test_a_training_rollout_refuses_truncation_and_says_why(bench: Bench, cut):
    (name, *_) = cut
    request = replace(bench.request(prompt_of(9), **cut), for_training=True)
    with pytest.raises(SamplingBiased) as refused:
        await bench.run(request)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.metadata["field"] == name
    assert name in refused.value.message
    greedy = replace(bench.request(prompt_of(9), **{**cut, "temperature": 0.0}), for_training=True)
    if bench.engine.capabilities.truncates_sampling:
        await bench.run(greedy)
        await bench.run(
            replace(request, for_training=False, request_id=unique("evaluation"), sample_ids=(unique("evaluation"),))
        )


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
async def test_truncation_cuts_what_can_be_drawn_but_not_the_logprobs(bench: Bench, cut):
    prompt = prompt_of(9)
    if not bench.engine.capabilities.truncates_sampling:
        with pytest.raises(Unsupported):
            await bench.ask(prompt, **cut)
        return
    (sample,) = await bench.ask(prompt, **cut)
    bench.oracle.assert_greedy(prompt, sample.token_ids, bench.kind.tolerance)
    tokens = [*prompt, *sample.token_ids]
    expected = bench.oracle.forward(tokens).logprobs(tokens, len(prompt))
    assert torch.tensor(sample.logprobs) == pytest.approx(expected, abs=bench.kind.tolerance)


async def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(bench: Bench):
    prompt, temperature, least = prompt_of(9), 1.5, 0.8
    if not bench.engine.capabilities.truncates_sampling:
        return  # refused: above
    samples = await bench.ask(prompt, 8, min_p=least, temperature=temperature, max_new_tokens=24)
    beside = 0
    for sample in samples:
        logits = bench.oracle.forward([*prompt, *sample.token_ids]).logits_TV[len(prompt) - 1 : -1] / temperature
        chosen = logits.gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
        likelihood = torch.exp(chosen - logits.amax(-1))
        assert likelihood.min() > least - 1e-4
        beside += int((likelihood < 1).sum())
    assert beside > 10  # it is not greedy


async def test_a_temperature_near_0_is_greedy_and_its_logprobs_are_its_own(bench: Bench):
    prompt = prompt_of(20)
    (sample,) = await bench.ask(prompt, temperature=1e-6, max_new_tokens=16)
    bench.oracle.assert_greedy(prompt, sample.token_ids, bench.kind.tolerance)
    assert sample.logprobs == pytest.approx([0.0] * 16, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_equal_weights_give_a_ratio_of_one_at_any_temperature(bench: Bench, figure, temperature):
    """The trainer divides its logits by the same temperature."""
    prompt = prompt_of(20)
    samples = await bench.ask(prompt, 6, temperature=temperature, max_new_tokens=24)
    for sample in samples:
        tokens = [*prompt, *sample.token_ids]
        trainer = bench.oracle.forward(tokens).logprobs(tokens, len(prompt), temperature)
        off = float((torch.exp(trainer - torch.tensor(sample.logprobs)) - 1).abs().max())
        figure(f"ratio minus one at temperature {temperature}", off)
        assert off <= max(1e-4, bench.kind.tolerance / 5)


async def test_tokens_are_drawn_with_the_probabilities_reported(bench: Bench):
    """First tokens of many samples at temperature 0.6, against the oracle's distribution: chi-squared, far out."""
    prompt, count = prompt_of(9), 2000
    answers = await bench.ask(prompt, count, temperature=0.6, max_new_tokens=1)
    expected = torch.softmax(bench.oracle.forward(prompt).logits_TV[-1] / 0.6, -1) * count
    seen = torch.bincount(torch.tensor([sample.token_ids[0] for sample in answers]), minlength=len(expected))
    likely = expected >= 5
    statistic = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
    degrees = int(likely.sum())
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5
    assert float(seen[~likely].sum()) < float(expected[~likely].sum()) * 1.5 + 10


async def test_a_log_probability_that_is_none_is_marked_and_counted_at_the_edge_and_ends_nothing(bench: Bench):
    """Weights that compute nonsense: whatever the engine makes of them, the wire carries no such number."""
    broken = tensors(2)
    broken["model.norm.weight"].fill_(3e38)  # numbers, but what is computed with them is none
    broken["lm_head.weight"].fill_(3e38)
    version = PolicyVersion(bench.version.incarnation, bench.version.step + 1)
    await bench.engine.update(version, broken, lambda paused: None)
    bench.version, bench.seed = version, 0
    counted = logprobs_unknown._value.get()
    request = bench.request(prompt_of(9), samples=3, max_new_tokens=5)
    messages = [chunk_to_proto(chunk, None) async for chunk in bench.engine.decode(request)]
    logprobs = [value for message in messages for value in message.logprobs]
    assert len(logprobs) == sum(len(message.token_ids) for message in messages) == 15
    assert set(logprobs) == {UNKNOWN_LOGPROB}
    assert logprobs_unknown._value.get() - counted == 15
    await bench.serve(1)
    assert all(value <= 0 for value in (await bench.ask(prompt_of(9)))[0].logprobs)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
async def test_a_temperature_near_nothing_is_greedy(bench: Bench, temperature):
    prompt = prompt_of(9)
    (sample,) = await bench.ask(prompt, temperature=temperature, max_new_tokens=6)
    assert sample.token_ids == await bench.greedy(prompt, 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_partial_generation_that_resumes_asks_for_what_is_left_and_ends_as_if_nothing_had_been(
    bench: Bench, temperature
):
    """Draws depend on the position alone, and so they go on where they were."""
    prompt, salt, budget = prompt_of(2 * bench.block + 3), unique("salt"), 150
    sampling = {"temperature": temperature, "seed": 11}
    (whole,) = await bench.ask(prompt, max_new_tokens=budget, **sampling)
    request = bench.request(prompt, salt=salt, max_new_tokens=budget, **sampling)
    part = Finished()
    async for chunk in bench.engine.decode(request, flush_s=0.0):
        part.add(chunk)
        if len(part.token_ids) >= 10 and not part.finish_reason:
            await bench.engine.abort(request.request_id)
    assert (part.finish_reason, len(part.token_ids) < budget) == ("aborted", True)
    left = budget - len(part.token_ids)
    (rest,) = await bench.ask([*prompt, *part.token_ids], salt=salt, max_new_tokens=left, **sampling)
    assert rest.cached_token_count >= 2 * bench.block
    assert (len(rest.token_ids), rest.finish_reason) == (left, "length")
    assert [*part.token_ids, *rest.token_ids] == whole.token_ids
    assert [*part.logprobs, *rest.logprobs] == pytest.approx(whole.logprobs, abs=bench.kind.tolerance)
