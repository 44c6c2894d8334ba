"""Weight updates with requests in flight: nothing restarts, nothing is mixed up, a failure leaves no trace."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks
from tests.unit.engine.helpers import (
    CONFIG,
    PROMPT,
    SIZES,
    V1,
    V2,
    V3,
    decode_request,
    finish,
    freed,
    greedy,
    logprobs,
    prefill_request,
    started,
    tensors,
    weights,
)


def accept(paused) -> None:
    """A verification that finds nothing."""


def decoded(core: EngineCore) -> list:
    return [chunk for output in core.take_outputs() if isinstance(output, Chunks) for chunk in output.chunks]


def oracle(prompt: list[int], before: int, count: int) -> list[int]:
    """Greedy tokens when weights 1 compute the first `before` steps and weights 2 go on with their KV.

    An engine of one row that is stepped by hand, told apart from the engine under test by having no batch, no sharing
    and no cache: the KV of weights 1 enters as an export.
    """
    core = EngineCore(SIZES, CONFIG)
    core.update(V1, tensors(weights(1)), accept)
    core.add_decode(decode_request("o", prompt=prompt, temperature=0.0, max_new_tokens=before), 1.0)
    while core.busy:
        core.step()
    first = decoded(core)[0].token_ids
    assert first == greedy(weights(1), prompt, before)
    # By hand: positions so far hold KV of weights 1; the newest token and all later ones run on weights 2.
    return first + _continue(prompt + first, len(prompt) + before - 1, count - before)


def _continue(tokens: list[int], old_positions: int, count: int) -> list[int]:
    old, new = weights(1), weights(2)
    keys_values = _kv_of(old, tokens[:old_positions])
    out = []
    for _ in range(count):
        logits, keys_values = _forward(new, tokens[len(keys_values[0][0]) :], keys_values)
        tokens = [*tokens, int(logits.argmax())]
        out.append(tokens[-1])
    return out


def _kv_of(model, tokens):
    empty = torch.zeros(0, SIZES.n_kv_heads, SIZES.head_dim)
    return _forward(model, tokens, [(empty, empty)] * SIZES.n_layers)[1]


def _forward(model, tokens, past):
    """The last token's logits, and KV with the new positions appended; plain attention written out."""
    start, present = len(past[0][0]), []
    positions = torch.arange(start, start + len(tokens)).unsqueeze(0)
    h = model.tok_embeddings(torch.tensor([tokens]))
    model.routes.begin()
    for layer, (old_k, old_v) in zip(model.layers.values(), past, strict=True):
        attention = layer.attention
        q, k, v = attention.qkv_linear(layer.attention_norm(h))
        q, k = attention.rope(attention.q_norm(q), attention.k_norm(k), positions)
        k, v = torch.cat((old_k, k[0])), torch.cat((old_v, v[0]))
        present.append((k, v))
        repeats = SIZES.n_heads // SIZES.n_kv_heads
        scores = torch.einsum("tnh,cnh->ntc", q[0], k.repeat_interleave(repeats, 1)) / SIZES.head_dim**0.5
        scores = scores.masked_fill(torch.arange(len(k)) > positions[0][:, None], -torch.inf)
        out = torch.einsum("ntc,cnh->tnh", scores.softmax(-1), v.repeat_interleave(repeats, 1))
        h = h + attention.wo(out.flatten(1).unsqueeze(0))
        h = h + layer.moe(layer.ffn_norm(h))
    return model.lm_head(model.norm(h))[0, -1], present


@pytest.mark.parametrize("before", [1, 4, 7])
def test_tokens_after_a_swap_come_from_the_new_weights_on_the_kept_kv(before):
    core = EngineCore(SIZES, CONFIG)
    core.update(V1, tensors(weights(1)), accept)
    prompts = [PROMPT, PROMPT[:5], PROMPT[::-1]]
    for index, prompt in enumerate(prompts):
        core.add_decode(decode_request(f"{index}", prompt=prompt, temperature=0.0, max_new_tokens=12), 60.0)
    for _ in range(before):
        core.step()
    report = core.update(V2, tensors(weights(2)), accept)
    assert (report.previous_version, report.in_flight_samples) == (V1, 3)
    while core.busy:
        core.step()
    tokens: dict[str, list[int]] = {}
    spans: dict[str, list] = {}
    for output in core.take_outputs():
        if isinstance(output, Chunks):
            for chunk in output.chunks:
                tokens.setdefault(output.request_id, []).extend(chunk.token_ids)
                spans.setdefault(output.request_id, []).extend(chunk.versions)
                assert chunk.kv_oldest_version == V1
    for index, prompt in enumerate(prompts):
        assert tokens[f"{index}"] == oracle(prompt, before, 12)
        assert spans[f"{index}"] == [(before, V1), (12 - before, V2)]


async def test_a_swap_between_steps_restarts_nothing():
    engine = await started(weights(1))
    request = decode_request(samples=8, max_new_tokens=50)
    stream = engine.decode_batches(request, flush_s=0.0)
    got = await anext(stream)
    report = await engine.update(V2, tensors(weights(2)), accept)
    assert (report.in_flight_samples, engine.version) == (8, V2)
    async for chunks in stream:
        got += chunks
    for index in range(8):
        spans = [span for chunk in got if chunk.sample_index == index for span in chunk.versions]
        versions = [version for count, version in spans for _ in range(count)]
        assert versions == sorted(versions)
        assert len(versions) == 50
        assert set(versions) == {V1, V2}
        assert engine.routes(f"d/{index}")[0].shape == (50, SIZES.n_layers, SIZES.top_k)
    assert report.pause_s >= report.apply_s > 0
    await freed(engine)
    await engine.stop()


async def test_a_failed_update_rolls_back():
    engine = await started(weights(1))
    before = await engine.checksums(lambda name, array: hash(array.tobytes()))
    seen = []

    def reject(paused) -> None:
        seen.append(threading.current_thread().name)
        new = weights(2)
        assert np.array_equal(paused.parameters()["model.norm.weight"], new.norm.weight.numpy())
        expected = logprobs(new, PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)
        assert torch.tensor(paused.probe(PROMPT)) == pytest.approx(expected, abs=1e-5)
        raise ValueError("checksum differs")

    task = asyncio.create_task(finish(engine, decode_request(temperature=0.0, max_new_tokens=40)))
    await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="checksum differs"):
        await engine.update(V2, tensors(weights(2)), reject)
    assert seen == ["engine"]
    assert engine.version == V1
    assert await engine.checksums(lambda name, array: hash(array.tobytes())) == before
    (sample,) = await task
    assert sample.token_ids == greedy(weights(1), PROMPT, 40)
    assert sample.versions == [V1] * 40
    with pytest.raises(ValueError, match="does not match"):
        await engine.update(V2, {"lm_head.weight": torch.zeros(1)}, accept)
    assert await engine.checksums(lambda name, array: hash(array.tobytes())) == before
    await engine.stop()


async def test_a_rollout_never_reads_kv_older_than_its_dispatch_across_two_updates():
    """The salt names the version served at dispatch; late members of a group keep the group's salt."""
    prefill, decode = await started(weights(1)), await started(weights(1))
    salts = {V1: "run/1.0/f32", V2: "run/1.1/f32", V3: "run/1.2/f32"}
    seeds = {V1: 1, V2: 2, V3: 3}

    async def member(name: str, dispatched, expect_cached: int):
        result = await prefill.prefill(prefill_request(name, salt=salts[dispatched]))
        assert result.cached_token_count == expect_cached
        assert result.kv_oldest_version >= dispatched
        request = decode_request(name, salt=salts[dispatched], kv=prefill.export_kv(name), temperature=0.0)
        (sample,) = await finish(decode, request)
        assert all(oldest >= dispatched for oldest in sample.oldest)
        prefill.release_kv(name)
        return sample

    assert (await member("a1", V1, 0)).token_ids == greedy(weights(1), PROMPT, 8)
    for version in (V2, V3):
        for engine in (decode, prefill):  # the decode pool first, so that KV is never newer than its sampler
            await engine.update(version, tensors(weights(seeds[version])), accept)
        fresh = await member(f"fresh-{version}", version, 0)
        assert fresh.token_ids == greedy(weights(seeds[version]), PROMPT, 8)
        assert fresh.oldest == {version}
        late = await member(f"late-{version}", V1, 8)  # its group's cache survived
        assert late.oldest == {V1}
        assert set(late.versions) == {version}
    again = await member("late-v2", V2, 8)
    assert again.oldest == {V2}
    for engine in (prefill, decode):
        await freed(engine)
        await engine.stop()


async def test_a_probe_neither_reads_nor_writes_the_cache():
    engine = await started(weights(1))
    await engine.probe(PROMPT, "s")
    (sample,) = await finish(engine, decode_request())
    assert sample.cached_token_count == 0
    expected = logprobs(weights(1), PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)
    assert torch.tensor(await engine.probe(PROMPT, "s")) == pytest.approx(expected, abs=1e-5)
    await engine.stop()
