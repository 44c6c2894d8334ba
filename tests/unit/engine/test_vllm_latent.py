"""Latent attention on vLLM: where its tensors go, what is made of them, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.config import ConfigError
from slipstream.engine.vllm.config import kv_bytes_per_token
from slipstream.engine.vllm.latent import check_latent, is_cut_of, latent_width
from slipstream.engine.vllm.layout import group
from slipstream.engine.vllm.rows import routes_of
from slipstream.models.checkpoint import expected_shapes
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.rope_config import RopeScaling

YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
KEYS: dict[str, Any] = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "n_dense_layers": 1, "ffn_dim": 24}
KEYS |= {"kv_lora_rank": 512, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 6, "expert_dim": 8}
KEYS |= {"n_experts": 4, "n_shared_experts": 1, "top_k": 2, "n_groups": 2, "top_k_groups": 1}
KEYS |= {"rope_theta": 100.0, "max_context_tokens": 64, "norm_eps": 1e-6}
MOE = MoeConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, n_experts=4)


def parameters(sizes: DeepseekV3Config) -> dict[str, tuple[str, ...]]:
    """Names of tensors by vLLM's parameter, of the last layer, without its prefix."""
    prefix = "model.layers.1."
    return {
        f"{each.module}.{each.parameter}".removeprefix(prefix): tuple(n.removeprefix(prefix) for n in each.names)
        for each in group(expected_shapes(sizes))
        if each.module.startswith(prefix)
    }


def test_what_vllm_fuses_lies_together():
    found = parameters(DeepseekV3Config(**KEYS, q_lora_rank=12))
    down = tuple(f"self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert found["self_attn.fused_qkv_a_proj.weight"] == down
    assert found["self_attn.q_b_proj.weight"] == ("self_attn.q_b_proj.weight",)
    shared = tuple(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up"))
    assert found["mlp.shared_experts.gate_up_proj.weight"] == shared
    assert found["mlp.gate.e_score_correction_bias"] == ("mlp.gate.e_score_correction_bias",)
    assert len(found["mlp.experts.w13_weight"]) == 8


def test_a_query_that_is_not_compressed_is_fused_with_nothing():
    found = parameters(DeepseekV3Config(**KEYS))
    for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        assert found[f"self_attn.{name}.weight"] == (f"self_attn.{name}.weight",)
    assert not [name for name in found if "qkv" in name]


def test_a_token_takes_one_latent_a_layer():
    sizes = DeepseekV3Config(**KEYS)
    assert latent_width(sizes) == 576
    assert kv_bytes_per_token(sizes, "bfloat16") == 2 * 576 * 2
    assert latent_width(MOE) == 0
    assert kv_bytes_per_token(MOE, "float32") == 2 * 8 * 4


def test_matrices_of_heads_are_compared_with_what_they_were_cut_from():
    heads, key, value, latent = 2, 3, 5, 4
    weight = torch.randn(heads * (key + value), latent)
    cut = weight.view(heads, key + value, latent)
    layer = SimpleNamespace(num_heads=heads, qk_nope_head_dim=key, v_head_dim=value)
    layer.W_UK_T, layer.W_UV = cut[:, :key].clone(), cut[:, key:].transpose(1, 2).clone()
    assert is_cut_of(layer, weight)
    for stale in ("W_UK_T", "W_UV"):
        kept = getattr(layer, stale)
        setattr(layer, stale, kept + 1)
        assert not is_cut_of(layer, weight)
        setattr(layer, stale, kept)


def test_rows_of_layers_without_experts_are_left_out():
    rows = np.arange(2 * 3 * 2).reshape(2, 3, 2)
    found = routes_of(rows, 5, np.dtype(np.uint8), 2)
    assert found.rows.tolist() == rows[:, 1:].tolist()
    assert found.first_position == 5


GOOD: dict[str, Any] = {"connector": "none", "offloads": False, "quantization": "none", "device": "cpu"}
GOOD |= {"dtype": "float32"}
GPU: dict[str, Any] = {**GOOD, "device": "cuda", "dtype": "bfloat16"}
V3: dict[str, Any] = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("sizes", "settings", "said"),
    [
        ({"rope_scaling": YARN}, {"connector": "nixl"}, "engine.connector is 'nixl'"),
        ({"rope_scaling": YARN}, {"offloads": True}, "engine.offload is 'set'"),
        ({"rope_scaling": YARN}, {"quantization": "fp8_per_block", "device": "cuda"}, "engine.quantization"),
        ({"rope_scaling": YARN, "kv_lora_rank": 16}, {}, r"vLLM on the CPU takes \(512, 64\) alone"),
        ({}, {}, 'rope_scaling is not of type "yarn"'),
        ({}, GPU, r"qk_nope_head_dim, .* v_head_dim are \(8, 64, 6\); vLLM on a GPU takes \(128, 64, 128\), "),
        ({**V3, "v_head_dim": 64}, GPU, r"are \(128, 64, 64\)"),
        (V3, {**GPU, "dtype": "float32"}, 'engine.dtype is "float32"'),
    ],
)
def test_what_was_not_tried_or_is_computed_otherwise_is_refused(sizes, settings, said):
    with pytest.raises(ConfigError, match=said):
        check_latent(DeepseekV3Config(**{**KEYS, **sizes}), **{**GOOD, **settings})


def test_all_else_is_taken():
    check_latent(DeepseekV3Config(**KEYS, rope_scaling=YARN), **GOOD)
    check_latent(DeepseekV3Config(**{**KEYS, **V3, "kv_lora_rank": 16}), **GPU)
    check_latent(DeepseekV3Config(**{**KEYS, **V3}), **{**GPU, "dtype": "float16"})
    check_latent(MOE, **{**GOOD, "connector": "nixl", "offloads": True})
