"""A tiny model, an engine on it, and the plain full-forward loop that the engine must agree with."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, KvPayload, PrefillRequest, SampleChunk, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.engine import EmbeddedEngine
from slipstream.models.checkpoint import to_hf
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model, init_weights

SIZES = MoeConfig(vocab_size=23, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, expert_dim=16)
CONFIG = EmbeddedConfig(block_size_tokens=4, block_count=128, max_running_samples=16)
V1, V2, V3 = PolicyVersion(1, 0), PolicyVersion(1, 1), PolicyVersion(1, 2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def weights(seed: int) -> MoeModel:
    """The trainer's flavour of the model."""
    model = build_model(SIZES)
    init_weights(model, seed)
    return model.eval().requires_grad_(False)


def tensors(model: MoeModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in to_hf(model).items()}


async def started(model: MoeModel, config: EmbeddedConfig = CONFIG) -> EmbeddedEngine:
    engine = EmbeddedEngine(SIZES, config)
    await engine.start()
    await engine.update(V1, tensors(model), lambda paused: None)
    return engine


def logprobs(model: MoeModel, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities `[T, V]` of what follows each token, by one full forward pass."""
    model.routes.begin()
    return torch.log_softmax(model(torch.tensor([token_ids]))[0], -1)


def greedy(model: MoeModel, prompt: list[int], count: int) -> list[int]:
    """The plain loop: one full forward pass for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logprobs(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def decode_request(
    request_id: str = "d",
    samples: int = 1,
    salt: str = "s",
    prompt: list[int] = PROMPT,
    kv: KvPayload | None = None,
    **sampling: Any,
) -> DecodeRequest:
    ids = tuple(f"{request_id}/{index}" for index in range(samples))
    return DecodeRequest(request_id, prompt, salt, ids, Sampling(**{"max_new_tokens": 8, "seed": 7, **sampling}), kv)


async def freed(engine: EmbeddedEngine) -> None:
    """Return when no block is held: releases reach the engine's thread at its next step."""
    await engine.checksums(lambda name, array: 0)
    assert engine.load().blocks_used == 0
    engine._core.blocks.check()


def prefill_request(request_id: str = "p", prompt: list[int] = PROMPT, salt: str = "s") -> PrefillRequest:
    return PrefillRequest(request_id, prompt, salt)


class Finished:
    """All chunks of one sample, put together."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[PolicyVersion] = []
        self.oldest: set[PolicyVersion] = set()
        self.finish_reason = ""
        self.cached_token_count = 0

    def add(self, chunk: SampleChunk) -> None:
        assert sum(count for count, _ in chunk.versions) == len(chunk.token_ids) == len(chunk.logprobs)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [version for count, version in chunk.versions for _ in range(count)]
        self.oldest.add(chunk.kv_oldest_version)
        self.finish_reason = chunk.finish_reason
        self.cached_token_count = chunk.cached_token_count


async def finish(engine: EmbeddedEngine, request: DecodeRequest, flush_s: float = 1.0) -> list[Finished]:
    samples = [Finished() for _ in request.sample_ids]
    async for chunk in engine.decode(request, flush_s):
        assert not samples[chunk.sample_index].finish_reason, "a chunk after the last one"
        samples[chunk.sample_index].add(chunk)
    assert all(sample.finish_reason for sample in samples)
    return samples
