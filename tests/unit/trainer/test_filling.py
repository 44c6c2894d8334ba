"""Buffers that every rank makes for itself are those of a model that was built whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.registry import find_architecture
from slipstream.trainer.parallel.filling import set_tables, without_weights

COMMON = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "max_context_tokens": 64, "rope_theta": 1e4}
NORMED = {"norm_eps": 1e-6, "ffn_dim": 16}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_dense_layers": 1}
EXPERTS = {"n_experts": 4, "n_shared_experts": 1, "top_k": 2, "n_groups": 1, "top_k_groups": 1, "expert_dim": 16}
FAMILIES = [
    LlamaConfig.model_validate({**COMMON, **NORMED, "n_kv_heads": 2, "head_dim": 16}),
    MoeConfig.model_validate({**COMMON, "n_kv_heads": 2, "head_dim": 16, "expert_dim": 16}),
    DeepseekV3Config.model_validate({**COMMON, **NORMED, **LATENT, **EXPERTS}),
]


@pytest.mark.parametrize("sizes", FAMILIES, ids=lambda sizes: sizes.architecture)
def test_tables_are_those_of_a_model_built_whole(sizes):
    whole: Any = find_architecture(sizes.architecture).build_model(sizes)
    model: Any = without_weights(sizes)
    expected = dict(whole.named_buffers())
    set_tables(model, torch.device("cpu"))
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        assert torch.equal(found[name], table), name


def test_a_module_whose_buffers_nobody_makes_is_named():
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"^0: several ranks need a module with buffers to have"):
        set_tables(model, torch.device("cpu"))
