"""Sizes of a dense Qwen3 model. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from slipstream.models.dense_config import DenseConfig


class Qwen3Config(DenseConfig):
    """What transformers calls `qwen3`: Llama with norms of query and key."""

    FIXED: ClassVar[dict[str, Any]] = {"model_type": "qwen3", "hidden_act": "silu", "use_sliding_window": False}
    HF_CLASS = "Qwen3ForCausalLM"

    architecture: str = "qwen3"
