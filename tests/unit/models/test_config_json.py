"""What a `config.json` may say of a dense model, and what is refused by the name of its key."""

from __future__ import annotations

import pytest

from slipstream.common.config import ConfigError
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


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_sizes_come_back_from_the_config_that_they_write(config_class, scaling):
    kind = config_class.FIXED["model_type"]
    sizes = sizes_of(kind, {**SMOLLM2, "model_type": kind, "rope_scaling": scaling})
    assert isinstance(sizes, DenseConfig)
    assert config_class.from_hf(sizes.to_hf()) == sizes
    assert sizes.head_dim == 64
    assert sizes.rope_scaling == (RopeScaling(**scaling) if scaling else None)


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
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
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
