"""Dense Qwen3 from torchtitan's module tree, with our attention and rope nodes. See `models/base.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.models.qwen3.config import Qwen3Config

if TYPE_CHECKING:
    from slipstream.models.qwen3.model import Qwen3DenseModel


def read_sizes(config: dict[str, Any]) -> Qwen3Config:
    """The sizes in a Hugging Face `config.json` of model type `qwen3`."""
    return Qwen3Config.from_hf(config)


def build_model(sizes: Qwen3Config) -> Qwen3DenseModel:
    """The model, float32, weights not initialised."""
    from slipstream.models.qwen3 import model

    return model.build_model(sizes)


def init_weights(model: Qwen3DenseModel, seed: int) -> None:
    """Random start, the same for the same seed."""
    from slipstream.models.decoder import random_start

    random_start(model, seed)
