"""Block bookkeeping under any sequence of operations, in the pool alone and in a whole engine."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, PrefillRequest, Sampling
from slipstream.engine.embedded import sampler
from slipstream.engine.embedded.blocks import BlockPool
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks, PrefillDone
from slipstream.engine.hashing import block_hashes
from slipstream.models.checkpoint import to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights

SIZES = MoeConfig(
    vocab_size=11,
    dim=8,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    n_experts=2,
    expert_dim=4,
    max_context_tokens=16,
)


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), min_size=1, max_size=9)), max_size=60))
def test_the_pool_never_loses_or_shares_a_block_by_mistake(operations):
    pool, held = BlockPool(12), []
    known: set[int] = set()
    for kind, tokens in operations:
        if kind < 3:  # a prompt comes: hit what is known, fill the rest
            salt = "ab"[kind % 2]
            hashes = block_hashes(salt, tokens, 2)
            hits = pool.match(hashes)
            missing = -(-len(tokens) // 2) - len(hits)
            if pool.available_beside(hits) < missing:
                continue
            pool.hold(hits)
            blocks = hits + pool.allocate(missing)
            pool.register(blocks[: len(hashes)], hashes, salt)
            held.append(blocks)
        elif kind == 4:
            pool.end_salt("ab"[len(tokens) % 2])
            assert pool.match(block_hashes("ab"[len(tokens) % 2], tokens, 2)) == []
        elif held:
            pool.release(held.pop(len(tokens) % len(held)))
        pool.check()
        assert pool.used == len({block for blocks in held for block in blocks})
        for event in pool.drain_events():
            known = known | set(event.block_hashes) if event.kind == "stored" else known - set(event.block_hashes)
        assert known == set(pool._block_of)
    for blocks in held:
        pool.release(blocks)
    assert pool.used == pool.dead_count == 0


def test_what_goes_on_from_a_prompt_whose_salt_has_ended_is_not_kept():
    pool, hashes = BlockPool(4), block_hashes("a", [1, 2, 3, 4, 5, 6], 2)
    blocks = pool.allocate(3)
    pool.register(blocks[:1], hashes[:1], "a")
    pool.end_salt("a")
    pool.register(blocks, hashes, "a")
    pool.release(blocks)
    pool.check()
    assert [event.kind for event in pool.drain_events()] == ["stored", "removed"]
    assert len(pool._free) == 4


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9)
operation = st.one_of(
    st.tuples(st.just("decode"), prompts, st.integers(1, 5), st.integers(1, 6)),
    st.tuples(st.just("prefill"), prompts),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("update")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(operation, max_size=40))
def test_whatever_happens_every_sample_ends_once_and_all_blocks_come_back(operations):
    with torch.inference_mode():
        _run(operations)


def _run(operations) -> None:
    model = build_model(SIZES)
    init_weights(model, 0)
    config = EmbeddedConfig(block_size_tokens=2, block_count=16, max_running_samples=4, max_prefill_tokens=3)
    core = EngineCore(SIZES, config)
    core.update(PolicyVersion(1, 0), to_hf(model), lambda paused: None)
    expected: dict[str, int] = {}
    ended: dict[str, int] = {}

    def take() -> None:
        core.blocks.check()
        for output in core.take_outputs():
            if isinstance(output, PrefillDone):
                ended[output.request_id] = ended.get(output.request_id, 0) + 1
            elif isinstance(output, Chunks):
                count = sum(bool(chunk.finish_reason) for chunk in output.chunks)
                ended[output.request_id] = ended.get(output.request_id, 0) + count
                assert output.ended == (ended[output.request_id] == expected[output.request_id])

    for number, (kind, *arguments) in enumerate(operations):
        name = f"{number}"
        if kind == "decode":
            prompt, samples, new_tokens = arguments
            expected[name] = samples
            ids = tuple(f"{name}/{index}" for index in range(samples))
            sampling = Sampling(max_new_tokens=new_tokens, seed=number, stop_token_ids=(3,))
            core.add_decode(DecodeRequest(name, prompt, "s", ids, sampling), 0.0)
        elif kind == "prefill":
            expected[name] = 1
            core.add_prefill(PrefillRequest(name, arguments[0], "s"))
        elif kind == "abort":
            core.abort(f"{arguments[0]}")
        elif kind == "update":
            assert core.version is not None
            core.update(PolicyVersion(1, core.version.step + 1), to_hf(model), lambda paused: None)
        else:
            for _ in range(arguments[0]):
                core.step()
        take()
    for transfer_id in list(core.transfers):
        core.release_transfer(transfer_id)
    while core.busy:
        assert core.step(), "work is left and nothing runs"
        take()
        for transfer_id in list(core.transfers):
            core.release_transfer(transfer_id)
    assert ended == expected
    assert core.blocks.used == 0


@settings(deadline=None)
@given(st.integers(0, 2**63), st.integers(2, 40))
def test_draws_depend_on_key_and_position_alone(seed, rows):
    keys = np.array([sampler.sample_key(seed, index) for index in range(rows)], np.uint64)
    positions = np.arange(rows)
    together = sampler.uniforms(keys, positions)
    alone = [sampler.uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(rows)]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()
    logits = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed % 1000))
    tokens, logprobs = sampler.sample(logits, together)
    for i in range(rows):
        token, logprob = sampler.sample(logits[i : i + 1], together[i : i + 1])
        assert token == tokens[i]
        assert abs(float(logprob - logprobs[i])) < 1e-6


def test_sampled_frequencies_are_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -50.0])
    keys = np.array([sampler.sample_key(5, index) for index in range(200_000)], np.uint64)
    uniforms = sampler.uniforms(keys, np.full(len(keys), 11))
    tokens, _ = sampler.sample(logits.expand(len(keys), -1), uniforms)
    frequencies = torch.bincount(tokens, minlength=5) / len(keys)
    assert (frequencies - logits.softmax(0)).abs().max() < 0.005
