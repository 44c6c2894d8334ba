"""DeepSeek-V3 from torchtitan's module tree, with our attention, rope, router and expert nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.models.deepseek_v3.config import DeepseekV3Config

if TYPE_CHECKING:
    from slipstream.models.deepseek_v3.model import DeepseekModel


def read_sizes(config: dict[str, Any]) -> DeepseekV3Config:
    """The sizes in a Hugging Face `config.json` of model type `deepseek_v3`."""
    return DeepseekV3Config.from_hf(config)


def build_model(sizes: DeepseekV3Config) -> DeepseekModel:
    """The model, float32, weights not initialised."""
    from slipstream.models.deepseek_v3 import model

    return model.build_model(sizes)


def init_weights(model: DeepseekModel, seed: int) -> None:
    """Random start, the same for the same seed."""
    from slipstream.models.decoder import random_start

    random_start(model, seed, residual_outputs=("wo.weight", "w2.weight", "w2_EDF"))
