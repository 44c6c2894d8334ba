"""Tiny models of the families, random, in transformers' code and in ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream.models.checkpoint import load_model
from slipstream.models.lora.adapters import Adapters, attach
from slipstream.models.lora.config import GROUPS, LoraConfig
from slipstream.models.registry import read_config, sizes_of

transformers.logging.set_verbosity_error()

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}


def theirs(kind: str, changes: dict) -> Any:
    """transformers' model with random weights, norms and biases too."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.5 * torch.randn_like(buffer))
    return model.eval()


def ours(directory: Path):
    config = read_config(directory)
    model = load_model(sizes_of(config["model_type"], config), directory)
    model.routes.begin()
    return model


def tokens(length: int = 40) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], (1, length), generator=torch.Generator().manual_seed(3))


def trained(model: Any, targets: tuple[str, ...] = GROUPS) -> Adapters:
    """A model's adapters as after some steps."""
    adapters = attach(model, LoraConfig(rank=4, alpha=6.0, targets=targets), 1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return adapters
