"""Sizes of a DeepSeek-V3 model, read from and written to a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig
from slipstream.models.rope_config import RopeScaling, read_rope

_FIXED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "quantization_config": None,
}
"""What other values of a `config.json` mean is not built."""


class DeepseekV3Config(BaseConfig):
    """The shape of a DeepSeek-V3 model: latent attention, some dense layers, then layers with shared experts."""

    architecture: str = "deepseek_v3"
    """A built-in architecture, or the import path of one of your own (docs/your-model.md)."""

    vocab_size: int = Field(ge=2)
    """Rows of the embedding and of the output head."""

    dim: int = Field(ge=8)
    """Width of the residual stream."""

    n_layers: int = Field(ge=1)
    """Transformer blocks."""

    n_dense_layers: int = Field(ge=0)
    """The first of them, which have no experts."""

    n_heads: int = Field(ge=1)
    """Heads of queries, keys and values."""

    q_lora_rank: int | None = Field(default=None, ge=1)
    """Width of the compressed query; unset means that it is not compressed."""

    kv_lora_rank: int = Field(ge=1)
    """Width of the compressed key and value."""

    qk_nope_head_dim: int = Field(ge=1)
    """Part of a query's or key's head that does not turn."""

    qk_rope_head_dim: int = Field(ge=2)
    """Part that does."""

    v_head_dim: int = Field(ge=1)
    """Size of a value's head; at most that of a key's."""

    ffn_dim: int = Field(ge=1)
    """Hidden width of a dense layer."""

    expert_dim: int = Field(ge=1)
    """Hidden width of one expert."""

    n_experts: int = Field(ge=1, le=65536)
    """Experts a layer of which tokens choose."""

    n_shared_experts: int = Field(ge=1)
    """Experts a layer that all tokens take."""

    top_k: int = Field(ge=1)
    """Experts chosen for each token."""

    n_groups: int = Field(ge=1)
    """Groups of experts; must divide `n_experts`."""

    top_k_groups: int = Field(ge=1)
    """Groups of which a token's experts are chosen."""

    normalised_weights: bool = True
    """Whether the weights of a token's experts sum to 1, before they are scaled."""

    weight_scale: float = 1.0
    """What they are scaled by."""

    rope_theta: float = Field(gt=1.0)
    """Base of the rotary embedding."""

    rope_scaling: RopeScaling | None = None
    """For contexts longer than those of pre-training."""

    max_context_tokens: int = Field(ge=2)
    """Longest sequence (prompt and answer) the model takes."""

    norm_eps: float = Field(gt=0.0)
    """Epsilon of the RMS norms of the residual stream."""

    eos_token_id: int | None = Field(default=None, ge=0)
    """The token that ends an answer; unset means the tokenizer's `<|end|>`."""

    @model_validator(mode="after")
    def _check(self) -> DeepseekV3Config:
        if self.qk_rope_head_dim % 2:
            raise ValueError("qk_rope_head_dim: must be even, as the rotary embedding turns pairs")
        if self.v_head_dim > self.head_dim:
            raise ValueError("v_head_dim: must not exceed qk_nope_head_dim + qk_rope_head_dim")
        if self.n_dense_layers >= self.n_layers:
            raise ValueError("n_dense_layers: must leave a layer with experts")
        if self.n_experts % self.n_groups or self.n_experts < 2 * self.n_groups:
            raise ValueError("n_groups: must divide n_experts into groups of 2 or more")
        if self.top_k_groups > self.n_groups:
            raise ValueError("top_k_groups: must not exceed n_groups")
        if self.top_k > self.top_k_groups * (self.n_experts // self.n_groups):
            raise ValueError("top_k: must not exceed the experts of top_k_groups groups")
        return self

    @property
    def moe_layers(self) -> int:
        """All but the first layers."""
        return self.n_layers - self.n_dense_layers

    @property
    def head_dim(self) -> int:
        """Of queries and keys; values are padded to it."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def n_kv_heads(self) -> int:
        """Keys and values are cached decompressed."""
        return self.n_heads

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that Hugging Face's DeepseekV3ForCausalLM reads."""
        return {
            **{key: value for key, value in _FIXED.items() if value is not None},
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "first_k_dense_replace": self.n_dense_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "intermediate_size": self.ffn_dim,
            "moe_intermediate_size": self.expert_dim,
            "n_routed_experts": self.n_experts,
            "n_shared_experts": self.n_shared_experts,
            "num_experts_per_tok": self.top_k,
            "n_group": self.n_groups,
            "topk_group": self.top_k_groups,
            "norm_topk_prob": self.normalised_weights,
            "routed_scaling_factor": self.weight_scale,
            "num_nextn_predict_layers": 0,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.to_hf() if self.rope_scaling else None,
            "max_position_embeddings": self.max_context_tokens,
            "rms_norm_eps": self.norm_eps,
            "torch_dtype": "float32",
            "eos_token_id": self.eos_token_id,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DeepseekV3Config:
        """The sizes in a `config.json` of model type `deepseek_v3`; raises `ValueError` naming what is not built."""
        for key, expected in _FIXED.items():
            if config.get(key, expected) != expected:
                raise ValueError(f"{key} is {config[key]!r}, and only {expected!r} is built")
        heads = config["num_attention_heads"]
        if (config.get("num_key_value_heads") or heads) != heads:
            raise ValueError(f"num_key_value_heads is {config['num_key_value_heads']!r}, and only {heads} is built")
        theta, scaling = read_rope(config)
        end = config.get("eos_token_id")
        return cls(
            architecture=config.get("slipstream_architecture", "deepseek_v3"),
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_dense_layers=config["first_k_dense_replace"],
            n_heads=heads,
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config["kv_lora_rank"],
            qk_nope_head_dim=config["qk_nope_head_dim"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
            ffn_dim=config["intermediate_size"],
            expert_dim=config["moe_intermediate_size"],
            n_experts=config["n_routed_experts"],
            n_shared_experts=config["n_shared_experts"],
            top_k=config["num_experts_per_tok"],
            n_groups=config["n_group"],
            top_k_groups=config["topk_group"],
            normalised_weights=config["norm_topk_prob"],
            weight_scale=config["routed_scaling_factor"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_context_tokens=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            eos_token_id=end[0] if isinstance(end, list) else end,
        )
