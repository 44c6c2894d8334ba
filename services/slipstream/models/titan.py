"""The parts of torchtitan that models are built from. Import them from here: it costs a fifth, see `light_import`."""

from __future__ import annotations

from slipstream.models.light_import import light_imports

with light_imports():
    import torchtitan.tools.utils

    # torchtitan's token dispatcher copies this name when it is imported, so it is set before.
    torchtitan.tools.utils.device_type = "cpu"

    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.embedding import Embedding
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import CosSinRoPE, _yarn_inv_freq
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3TransformerBlock, build_mla_moe_layers
    from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3TransformerBlock, _build_qwen3_moe_layers
    from torchtitan.protocols.module import Module

build_qwen3_moe_layers, yarn_inv_freq = _build_qwen3_moe_layers, _yarn_inv_freq

__all__ = [
    "CosSinRoPE",
    "DeepSeekV3Model",
    "DeepSeekV3TransformerBlock",
    "Embedding",
    "GroupedExperts",
    "Linear",
    "Llama3Model",
    "Llama3TransformerBlock",
    "LocalTokenDispatcher",
    "Module",
    "Qwen3Model",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "TokenChoiceTopKRouter",
    "build_mla_moe_layers",
    "build_qwen3_moe_layers",
    "make_ffn_config",
    "make_gqa_config",
    "yarn_inv_freq",
]
