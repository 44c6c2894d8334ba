"""Small models of both kinds, whole and the same in every process."""

from __future__ import annotations

from typing import Any

from slipstream.models import qwen3, qwen3_moe
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


def make(kind: str, seed: int = 0) -> Any:
    """`moe`, or `dense` with the embedding as its head."""
    family, sizes = (qwen3_moe, SIZES) if kind == "moe" else (qwen3, DENSE_SIZES)
    model = family.build_model(sizes)
    family.init_weights(model, seed)
    return model
