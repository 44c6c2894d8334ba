"""Sizes of a Llama model (Llama 2 and 3, SmolLM2, ...). Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from slipstream.models.dense_config import DenseConfig


class LlamaConfig(DenseConfig):
    """What transformers calls `llama`."""

    FIXED: ClassVar[dict[str, Any]] = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False}
    HF_CLASS = "LlamaForCausalLM"

    architecture: str = "llama"
