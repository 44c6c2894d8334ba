"""Sizes that dense decoders share, read from and written to a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig
from slipstream.models.rope_config import RopeScaling, read_rope


class DenseConfig(BaseConfig):
    """The shape of a decoder without experts; each family's own config says what is fixed in it."""

    FIXED: ClassVar[dict[str, Any]] = {}
    """Keys of `config.json` of which one value is built."""

    HF_CLASS: ClassVar[str] = ""
    """What transformers calls the model."""

    architecture: str
    """A built-in architecture, or the import path of one of your own (docs/your-model.md)."""

    vocab_size: int = Field(ge=2)
    """Rows of the embedding and of the output head."""

    dim: int = Field(ge=8)
    """Width of the residual stream."""

    n_layers: int = Field(ge=1)
    """Transformer blocks."""

    n_heads: int = Field(ge=1)
    """Query heads."""

    n_kv_heads: int = Field(ge=1)
    """Key and value heads; must divide `n_heads`."""

    head_dim: int = Field(ge=2)
    """Size of one head; `n_heads` times it need not be `dim`."""

    ffn_dim: int = Field(ge=1)
    """Hidden width of the feed-forward network."""

    rope_theta: float = Field(gt=1.0)
    """Base of the rotary embedding."""

    rope_scaling: RopeScaling | None = None
    """For contexts longer than those of pre-training."""

    max_context_tokens: int = Field(ge=2)
    """Longest sequence (prompt and answer) the model takes."""

    norm_eps: float = Field(gt=0.0)
    """Epsilon of every RMS norm."""

    tied_embeddings: bool = False
    """Whether the output head is the embedding."""

    attention_bias: bool = False
    """Whether the four projections of attention have biases."""

    eos_token_id: int | None = Field(default=None, ge=0)
    """The token that ends an answer; unset means the tokenizer's `<|end|>`."""

    @model_validator(mode="after")
    def _check(self) -> DenseConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads: must divide n_heads, {self.n_heads} (got {self.n_kv_heads})")
        if self.head_dim % 2:
            raise ValueError("head_dim: must be even, as the rotary embedding turns pairs")
        return self

    @property
    def moe_layers(self) -> int:
        """No layer has experts."""
        return 0

    @property
    def n_experts(self) -> int:
        return 0

    @property
    def top_k(self) -> int:
        return 0

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads."""
        return {
            **self.FIXED,
            "architectures": [self.HF_CLASS],
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.to_hf() if self.rope_scaling else None,
            "max_position_embeddings": self.max_context_tokens,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": self.attention_bias,
            "torch_dtype": "float32",
            "eos_token_id": self.eos_token_id,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Self:
        """The sizes in a `config.json` of this family; raises `ValueError` that names the key of what is not built."""
        for key, expected in cls.FIXED.items():
            if config.get(key, expected) != expected:
                raise ValueError(f"{key} is {config[key]!r}, and only {expected!r} is built")
        theta, scaling = read_rope(config)
        end = config.get("eos_token_id")
        heads = config["num_attention_heads"]
        return cls(
            architecture=config.get("slipstream_architecture", cls.FIXED["model_type"]),
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_dim=config["intermediate_size"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_context_tokens=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            eos_token_id=end[0] if isinstance(end, list) else end,
        )
