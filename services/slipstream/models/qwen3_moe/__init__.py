"""Qwen3-MoE from torchtitan's module tree, with our attention, router and expert nodes. See `models/base.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.models.qwen3_moe.config import MoeConfig

if TYPE_CHECKING:
    from slipstream.models.qwen3_moe.model import MoeModel


def read_sizes(config: dict[str, Any]) -> MoeConfig:
    """The sizes in a Hugging Face `config.json` of model type `qwen3_moe`."""
    return MoeConfig.from_hf(config)


def build_model(sizes: MoeConfig) -> MoeModel:
    """The model, float32, weights not initialised."""
    from slipstream.models.qwen3_moe import model

    return model.build_model(sizes)


def init_weights(model: MoeModel, seed: int) -> None:
    """Random start, the same for the same seed."""
    from slipstream.models.qwen3_moe.model import init_weights

    init_weights(model, seed)
