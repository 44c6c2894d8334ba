"""Dense Qwen3 from torchtitan's parts (`torchtitan.models.qwen3`), with our attention and rope nodes."""

from __future__ import annotations

from torch import Tensor

from slipstream.models.decoder import DecoderPasses, dense_views
from slipstream.models.dense import build_dense
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.routing import Routes
from slipstream.models.titan import Qwen3Model, Qwen3TransformerBlock


class Qwen3DenseModel(DecoderPasses, Qwen3Model):
    """torchtitan's model with our sizes. It has no routers, so its `Routes` hold nothing."""

    routes: Routes
    sizes: Qwen3Config

    def hf_views(self) -> dict[str, Tensor]:
        """The live parameters by Hugging Face name."""
        return dense_views(self)


def build_model(config: Qwen3Config) -> Qwen3DenseModel:
    """The model, float32, weights not initialised."""
    return build_dense(config, Qwen3DenseModel, Qwen3TransformerBlock, qk_norm=True)
