"""Trainer and engine compute the same log-probabilities where the whole context is of the trained version."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from doc_blocks import files_of

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, PrefillRequest, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.engine import EmbeddedEngine
from slipstream.engine.routes import route_dtype, stitch_routes
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.registry import find_architecture
from slipstream.trainer.loss_config import MaskedRatioLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.sequence import TrainSequence, version_number
from slipstream.trainer.step import Learner

SIZES = MoeConfig(vocab_size=60)
ELSEWHERE = "gelu_moe"
SAMPLES, NEW_TOKENS = 4, 10
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pools:
    prefill: EmbeddedEngine
    decode: EmbeddedEngine

    @property
    def n_experts(self) -> int:
        return self.decode.limits.expert_count

    async def update(self, version: PolicyVersion, learner: Learner) -> None:
        for engine in (self.decode, self.prefill):
            await engine.update(version, learner.export(), lambda paused: None)


@pytest.fixture(params=[("qwen3_moe", 4), (ELSEWHERE, 4), ("qwen3_moe", 256), ("qwen3_moe", 300)], ids=str)
def sizes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MoeConfig:
    """Of the built-in architecture, and of the one that the documents plug in from outside the package.

    With 256 experts each value of a byte is an expert; with 300 an id takes two.
    """
    (tmp_path / f"{ELSEWHERE}.py").write_text(files_of("docs/your-model.md")[f"{ELSEWHERE}.py"])
    monkeypatch.syspath_prepend(tmp_path)
    architecture, n_experts = request.param
    expert_dim = SIZES.expert_dim if n_experts == 4 else 8
    return SIZES.model_copy(update={"architecture": architecture, "n_experts": n_experts, "expert_dim": expert_dim})


def learner_of(sizes: MoeConfig, optim: OptimConfig) -> Learner:
    architecture = find_architecture(sizes.architecture)
    model = architecture.build_model(sizes)
    architecture.init_weights(model, 0)
    return Learner(model, optim, MaskedRatioLossConfig())


@pytest.fixture
async def pools(sizes: MoeConfig) -> AsyncIterator[Pools]:
    config = EmbeddedConfig(block_count=256, max_running_samples=32)
    pools = Pools(EmbeddedEngine(sizes, config), EmbeddedEngine(sizes, config))
    for engine in (pools.prefill, pools.decode):
        await engine.start()
    yield pools
    for engine in (pools.prefill, pools.decode):
        await engine.stop()


async def rollouts(
    pools: Pools, request_id: str, prompt: list[int], salt: str, temperature: float = 1.0
) -> list[TrainSequence]:
    """One group through prefill, KV transfer and decode, with the routes of both."""
    await pools.prefill.prefill(PrefillRequest(request_id, prompt, salt))
    sample_ids = tuple(f"{request_id}.{index}" for index in range(SAMPLES))
    sampling = Sampling(max_new_tokens=NEW_TOKENS, seed=1, temperature=temperature)
    kv = pools.prefill.export_kv(request_id)
    request = DecodeRequest(request_id, prompt, salt, sample_ids, sampling, kv)
    tokens: list[list[int]] = [[] for _ in sample_ids]
    logps: list[list[float]] = [[] for _ in sample_ids]
    sampled_at: list[list[int]] = [[] for _ in sample_ids]
    oldest: list[list[int]] = [[] for _ in sample_ids]
    async for chunk in pools.decode.decode(request):
        index = chunk.sample_index
        tokens[index] += chunk.token_ids
        logps[index] += chunk.logprobs
        for count, version in chunk.versions:
            sampled_at[index] += [version_number(version)] * count
        oldest[index] += [version_number(chunk.kv_oldest_version)] * len(chunk.token_ids)
    sequences = []
    for index, sample_id in enumerate(sample_ids):
        count = len(prompt) + len(tokens[index])
        segments = (pools.prefill.routes(request_id), pools.decode.routes(sample_id))
        shape = (SIZES.n_layers, SIZES.top_k)
        routes = stitch_routes(segments, 0, count - 1, shape, route_dtype(pools.n_experts))
        sequences.append(
            TrainSequence(
                token_ids=np.array([*prompt, *tokens[index]], np.int32),
                target_positions=np.arange(len(prompt), count),
                engine_logps=np.array(logps[index], np.float32),
                sampled_at=np.array(sampled_at[index]),
                kv_oldest=np.array(oldest[index]),
                routes=routes,
                advantage=(-1.0) ** index,
                temperature=temperature,
            )
        )
    return sequences


async def test_engine_and_trainer_agree_on_pure_tokens_at_every_version(pools, sizes):
    rng = np.random.default_rng(0)
    learner = learner_of(sizes, OptimConfig(lr=3e-3))
    prompts = [rng.integers(0, SIZES.vocab_size, length).tolist() for length in (5, 11, 18)]
    prompts.append([*prompts[2][:16], 1, 2, 3])  # its first two blocks are in the prefix cache
    for step in range(3):
        version = PolicyVersion(1, step)
        await pools.update(version, learner)
        batch = []
        for index, prompt in enumerate(prompts):
            batch += await rollouts(pools, f"{step}.{index}", prompt, str(version), temperature=(1.0, 0.6)[index % 2])
        count = sum(len(sequence.target_positions) for sequence in batch)
        metrics = learner.train([batch], step=step + 1, loss_token_count=count, trained=version_number(version))
        assert metrics["pure_token_count"] == count == len(prompts) * SAMPLES * NEW_TOKENS
        assert metrics["routes_unknown_fraction"] == 0.0
        assert metrics["pure_max_abs_diff"] < TOLERANCE
        assert metrics["mismatch_kl"] == metrics["mismatch_numeric"] < 1e-9


async def test_a_stale_prefix_is_told_from_a_pure_one(pools, sizes):
    learner = learner_of(sizes, OptimConfig(lr=3e-2, warmup_steps=0))
    await pools.update(PolicyVersion(1, 0), learner)
    prompt = list(range(1, 19))
    before = await rollouts(pools, "a", prompt, salt="same")
    learner.train([before], step=1, loss_token_count=40, trained=version_number(PolicyVersion(1, 0)))
    await pools.update(PolicyVersion(1, 1), learner)
    after = await rollouts(pools, "b", prompt, salt="same")  # the salt of its dispatch: the old prefix is used again
    metrics = learner.train([after], step=2, loss_token_count=40, trained=version_number(PolicyVersion(1, 1)))
    assert metrics["pure_token_count"] == 0
    assert metrics["tokens_stale_kv_fraction"] == 1.0
    assert metrics["mismatch_kl"] == metrics["mismatch_stale_kv"] > 1e-6
