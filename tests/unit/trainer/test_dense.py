"""A model without experts in the trainer: the warm-up takes it, and its balance loss is nothing."""

from __future__ import annotations

from slipstream.models.qwen3 import build_model, init_weights
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.trainer.config import SftConfig
from slipstream.trainer.sft import warm_up

from .tiny import VOCAB, Reversals

SIZES = Qwen3Config(
    vocab_size=VOCAB,
    dim=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    ffn_dim=64,
    rope_theta=100.0,
    max_context_tokens=32,
    norm_eps=1e-6,
    tied_embeddings=True,
)


def test_a_dense_model_learns_in_the_warm_up():
    model = build_model(SIZES)
    init_weights(model, 0)
    seen = []
    warm_up(model, SftConfig(batch_size=32, max_steps=15, decay_steps=5), Reversals(), seen.append)
    assert seen[-1].loss < 0.8 * seen[0].loss
