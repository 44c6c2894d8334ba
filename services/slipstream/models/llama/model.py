"""Llama from torchtitan's parts (`torchtitan.models.llama3`), with our attention and rope nodes."""

from __future__ import annotations

from torch import Tensor

from slipstream.models.decoder import DecoderPasses, dense_views
from slipstream.models.dense import build_dense
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.routing import Routes
from slipstream.models.titan import Llama3Model, Llama3TransformerBlock


class LlamaModel(DecoderPasses, Llama3Model):
    """torchtitan's model with our sizes. It has no routers, so its `Routes` hold nothing."""

    routes: Routes
    sizes: LlamaConfig

    def hf_views(self) -> dict[str, Tensor]:
        """The live parameters by Hugging Face name."""
        return dense_views(self)


def build_model(config: LlamaConfig) -> LlamaModel:
    """The model, float32, weights not initialised."""
    return build_dense(config, LlamaModel, Llama3TransformerBlock, qk_norm=False)
