"""Sizes of a Qwen3-MoE model, read from and written to a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig
from slipstream.common.disk import make_directory, replace_file


class MoeConfig(BaseConfig):
    """The shape of a Qwen3-MoE model. The defaults are the demo's; `vocab_size` comes from the tokenizer."""

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

    n_experts: int = Field(default=4, ge=1, le=255)
    """Experts a layer. One byte holds an expert id; 255 is kept for "unknown"."""

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

    @model_validator(mode="after")
    def _check(self) -> MoeConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError("n_kv_heads: must divide n_heads")
        if self.top_k > self.n_experts:
            raise ValueError("top_k: must not exceed n_experts")
        if self.head_dim % 2:
            raise ValueError("head_dim: must be even, as the rotary embedding turns pairs")
        return self

    def parameter_count(self, vocab_size: int | None = None) -> int:
        """Parameters of the whole model; `vocab_size` where the config leaves it to the tokenizer."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads) + 2 * self.head_dim
        experts = self.n_experts * (3 * self.dim * self.expert_dim + self.dim)
        layers = self.n_layers * (attention + experts + 2 * self.dim)
        return layers + (2 * (vocab_size or self.vocab_size) + 1) * self.dim

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that Hugging Face's Qwen3MoeForCausalLM reads."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
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
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_context_tokens,
            "rms_norm_eps": self.norm_eps,
            "torch_dtype": "float32",
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> MoeConfig:
        """The sizes in a Hugging Face `config.json` of model type `qwen3_moe`."""
        if config.get("model_type") != "qwen3_moe":
            raise ValueError(f"model_type is {config.get('model_type')!r}, not 'qwen3_moe'")
        return cls(
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            n_experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            expert_dim=config["moe_intermediate_size"],
            rope_theta=config["rope_theta"],
            max_context_tokens=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
        )

    def save(self, model_dir: Path) -> None:
        """Write `<model_dir>/config.json`."""
        make_directory(model_dir)
        replace_file(model_dir / "config.json", json.dumps(self.to_hf(), indent=2).encode() + b"\n")

    @classmethod
    def load(cls, model_dir: Path) -> MoeConfig:
        """Read `<model_dir>/config.json`."""
        return cls.from_hf(json.loads((model_dir / "config.json").read_text()))
