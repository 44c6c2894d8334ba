"""Replay in a router whose choice is not what weighs: bias and groups choose, the trainer's own scores weigh."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.models.deepseek_v3 import build_model, init_weights
from slipstream.models.deepseek_v3.config import DeepseekV3Config

SIZES = DeepseekV3Config(
    vocab_size=23,
    dim=32,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    ffn_dim=48,
    expert_dim=16,
    n_experts=8,
    n_shared_experts=1,
    top_k=3,
    n_groups=4,
    top_k_groups=2,
    rope_theta=100.0,
    max_context_tokens=64,
    norm_eps=1e-6,
)
TOKENS = torch.randint(23, (1, 12), generator=torch.Generator().manual_seed(0))


def model(seed: int) -> Any:
    built = build_model(SIZES)
    init_weights(built, seed)
    return built


def test_replayed_rows_are_taken_and_the_gate_still_learns():
    one, other = model(0), model(1)
    one.routes.begin(capture=True)
    one.hidden(TOKENS)
    recorded = one.routes.captured()
    assert recorded.shape == (12, 2, 3)
    other.routes.begin(replay_TLK=recorded, capture=True, balance=True)
    hidden = other.hidden(TOKENS)
    assert torch.equal(other.routes.captured(), recorded)
    hidden.square().sum().backward()
    for layer in list(other.layers.values())[1:]:
        assert layer.moe.router.gate.weight.grad.abs().max() > 0
        assert layer.moe.expert_bias_E.grad is None
    assert 1.0 <= float(other.routes.balance_loss().detach()) <= SIZES.n_experts / SIZES.top_k


def test_the_bias_moves_the_choice_and_not_the_weights():
    built = model(0)
    layer = list(built.layers.values())[1]
    x_1TD = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(1))
    built.routes.begin()
    with torch.no_grad():
        weights, ids, scores = layer.moe.router(x_1TD, torch.tensor([9.0, 8.0, 7.0, 0, 0, 0, 0, 0]))
    assert set(ids.flatten().tolist()) == {0, 1, 2}
    chosen = scores.gather(-1, ids)
    assert torch.allclose(weights, chosen / chosen.sum(-1, keepdim=True))
