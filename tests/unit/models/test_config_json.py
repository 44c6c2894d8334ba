"""What a `config.json` may say of a model, and what is refused by the name of its key."""

from __future__ import annotations

import pytest

from slipstream.common.config import ConfigError
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.dense_config import DenseConfig
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.registry import sizes_of
from slipstream.models.rope_config import RopeScaling

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_sizes_come_back_from_the_config_that_they_write(config_class, scaling):
    kind = config_class.FIXED["model_type"]
    sizes = sizes_of(kind, {**SMOLLM2, "model_type": kind, "rope_scaling": scaling})
    assert isinstance(sizes, DenseConfig)
    assert config_class.from_hf(sizes.to_hf()) == sizes
    assert sizes.head_dim == 64
    assert sizes.rope_scaling == (RopeScaling(**scaling) if scaling else None)


def test_deepseek_v3s_sizes_come_back_from_the_config_that_they_write():
    sizes = sizes_of("deepseek_v3", DEEPSEEK_V3)
    assert DeepseekV3Config.from_hf(sizes.to_hf()) == sizes
    assert (sizes.moe_layers, sizes.head_dim, sizes.n_kv_heads) == (58, 192, 128)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"v_head_dim": 256}, "v_head_dim: must not exceed"),
        ({"n_group": 256}, "n_groups: must divide"),
        ({"topk_group": 9}, "top_k_groups: must not exceed"),
        ({"num_experts_per_tok": 200}, "top_k: must not exceed"),
        ({"first_k_dense_replace": 61}, "n_dense_layers: must leave"),
    ],
)
def test_what_is_not_built_of_deepseek_v3_is_named(changes, said):
    with pytest.raises(ConfigError, match=said):
        sizes_of("deepseek_v3", {**DEEPSEEK_V3, **changes})


def test_transformers_5_and_earlier_versions_say_the_same():
    earlier = sizes_of("llama", {**SMOLLM2, "rope_scaling": {"type": "linear", "factor": 4.0}})
    config = {key: value for key, value in SMOLLM2.items() if key != "rope_theta"}
    rope = {"rope_type": "linear", "rope_theta": 100000, "factor": 4.0}
    assert sizes_of("llama", {**config, "rope_parameters": rope}) == earlier


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"model_type": "mistral"}, "model_type is 'mistral', and only 'llama' is built"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has no 'factor'"),
        ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "rope_scaling.attention_factor is not built"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has no 'low_freq_factor'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"num_key_value_heads": 2}, "n_kv_heads: must divide"),
        ("llama", {"head_dim": 63}, "head_dim: must be even"),
        ("qwen3", {"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window is True"),
    ],
)
def test_what_is_not_built_is_refused_by_the_name_of_its_key(kind, changes, said):
    with pytest.raises(ConfigError, match=said):
        sizes_of(kind, {**SMOLLM2, **changes})


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="has no 'intermediate_size'"):
        sizes_of("llama", {key: value for key, value in SMOLLM2.items() if key != "intermediate_size"})
