"""A tiny model, an engine on it, and the plain full-forward loop that the engine must agree with."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, KvPayload, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
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
