"""Small models, whole and the same in every process."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.models import qwen3, qwen3_moe
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.qwen3_moe.config import MoeConfig

SIZES = MoeConfig(
    vocab_size=48,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    n_experts=4,
    top_k=2,
    expert_dim=16,
    max_context_tokens=1100,
)

DENSE_SIZES = Qwen3Config(
    vocab_size=48,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    rope_theta=100.0,
    max_context_tokens=1100,
    norm_eps=1e-6,
    tied_embeddings=True,
)


def make(kind: str, seed: int = 0, *, started: bool = True) -> Any:
    """`moe`; `lora`, the same with adapters as after some steps; or `dense` with the embedding as its head."""
    family, sizes = (qwen3, DENSE_SIZES) if kind == "dense" else (qwen3_moe, SIZES)
    model = family.build_model(sizes)
    if started:
        family.init_weights(model, seed)
    if kind == "lora":
        attach(model, LoraConfig(rank=4), seed)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if started and name.endswith("lora_b"):
                parameter.data.normal_(0.0, 0.2, generator=generator)
    return model
