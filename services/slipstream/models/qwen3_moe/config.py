"""Sizes of a Qwen3-MoE model, read from and written to a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig

_FIXED: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
"""What other values of a `config.json` mean is not built."""


class MoeConfig(BaseConfig):
    """The shape of a Qwen3-MoE model. The defaults are the demo's; `vocab_size` comes from the tokenizer."""

    architecture: str = "qwen3_moe"
    """A built-in architecture, or the import path of one of your own (docs/your-model.md)."""

    vocab_size: int = Field(ge=2)
    """Rows of the embedding and of the output head."""

    dim: int = Field(default=128, ge=8)
    """Width of the residual stream."""

    n_layers: int = Field(default=3, ge=1)
    """Transformer blocks, every one with a mixture of experts."""

    n_heads: int = Field(default=4, ge=1)
    """Query heads."""

    n_kv_heads: int = Field(default=2, ge=1)
    """Key and value heads; must divide `n_heads`."""

    head_dim: int = Field(default=32, ge=2)
    """Size of one head."""

    n_experts: int = Field(default=4, ge=1, le=65536)
    """Experts a layer. Their ids travel in a byte up to 256, in two above."""

    top_k: int = Field(default=2, ge=1)
    """Experts chosen for each token; their weights are renormalised to sum to 1."""

    expert_dim: int = Field(default=64, ge=1)
    """Hidden width of one expert."""

    rope_theta: float = Field(default=100.0, gt=1.0)
    """Base of the rotary embedding. Small, as contexts of the demo are short."""

    max_context_tokens: int = Field(default=64, ge=2)
    """Longest sequence (prompt and answer) the model takes."""

    norm_eps: float = Field(default=1e-6, gt=0.0)
    """Epsilon of every RMS norm."""

    eos_token_id: int | None = Field(default=None, ge=0)
    """The token that ends an answer; unset means the tokenizer's `<|end|>`."""

    @model_validator(mode="after")
    def _check(self) -> MoeConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads: must divide n_heads, {self.n_heads} (got {self.n_kv_heads})")
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k: must not exceed n_experts, {self.n_experts} (got {self.top_k})")
        if self.head_dim % 2:
            raise ValueError("head_dim: must be even, as the rotary embedding turns pairs")
        return self

    def parameter_count(self, vocab_size: int | None = None) -> int:
        """Parameters of the whole model; `vocab_size` where the config leaves it to the tokenizer."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads) + 2 * self.head_dim
        experts = self.n_experts * (3 * self.dim * self.expert_dim + self.dim)
        layers = self.n_layers * (attention + experts + 2 * self.dim)
        return layers + (2 * (vocab_size or self.vocab_size) + 1) * self.dim

    @property
    def moe_layers(self) -> int:
        """Every layer has experts."""
        return self.n_layers

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that Hugging Face's Qwen3MoeForCausalLM reads."""
        return {
            **_FIXED,
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_dim,
            "intermediate_size": self.expert_dim,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_context_tokens,
            "rms_norm_eps": self.norm_eps,
            "torch_dtype": "float32",
            "eos_token_id": self.eos_token_id,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> MoeConfig:
        """The sizes in a Hugging Face `config.json` of model type `qwen3_moe`."""
        architecture = config.get("slipstream_architecture", "qwen3_moe")
        for key, expected in _FIXED.items():
            if config.get(key, expected) != expected:
                raise ValueError(f"{key} is {config[key]!r}, and only {expected!r} is built")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type is {rope['rope_type']!r}, and only 'default' is built")
        end = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            eos_token_id=end[0] if isinstance(end, list) else end,
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            n_experts=config[
                "num_experts" if "num_local_experts" not in config else "num_local_experts"
            ],  # transformers 5
            top_k=config["num_experts_per_tok"],
            expert_dim=config["moe_intermediate_size"],
            rope_theta=config["rope_theta"] if "rope_theta" in config else rope["rope_theta"],
            max_context_tokens=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
        )
