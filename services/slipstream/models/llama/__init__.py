"""Llama from torchtitan's module tree, with our attention and rope nodes. See `models/base.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.models.llama.config import LlamaConfig

if TYPE_CHECKING:
    from slipstream.models.llama.model import LlamaModel


def read_sizes(config: dict[str, Any]) -> LlamaConfig:
    """The sizes in a Hugging Face `config.json` of model type `llama`."""
    return LlamaConfig.from_hf(config)


def build_model(sizes: LlamaConfig) -> LlamaModel:
    """The model, float32, weights not initialised."""
    from slipstream.models.llama import model

    return model.build_model(sizes)


def init_weights(model: LlamaModel, seed: int) -> None:
    """Random start, the same for the same seed."""
    from slipstream.models.decoder import random_start

    random_start(model, seed)
