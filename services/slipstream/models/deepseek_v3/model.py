"""DeepSeek-V3 as torchtitan's module tree (`torchtitan.models.deepseek_v3`), with nodes of our own.

Layers that predict tokens further ahead (`num_nextn_predict_layers`) are not built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.attention import ContextAttention
from slipstream.models.base import Context
from slipstream.models.decoder import DecoderPasses, ends_views, feed_forward_views, retype
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.deepseek_v3.router import ReplayRouter
from slipstream.models.head import Head
from slipstream.models.qwen3_moe.experts import PermutingDispatcher, SplitExperts
from slipstream.models.rope import Rope
from slipstream.models.rope_config import sharpness
from slipstream.models.routing import Routes
from slipstream.models.titan import DeepSeekV3Model, Embedding, RMSNorm, build_mla_moe_layers

_LATENT_EPS = 1e-6
"""Of the norms of compressed query, key and value, whatever `rms_norm_eps` says."""


class LatentAttention(ContextAttention):
    """Attention whose values have narrower heads than its keys: a context takes them alike, so they are padded."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextAttention.Config):
        """No options."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLGH: Tensor,
        v_BLGH: Tensor,
        *,
        attention_masks: Context | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention output, with heads as wide as those of `v_BLGH`."""
        width = v_BLGH.shape[-1]
        padded = F.pad(v_BLGH, (0, k_BLGH.shape[-1] - width))
        return super().forward(q_BLNH, k_BLGH, padded, attention_masks=attention_masks, scale=scale)[..., :width]


class DeepseekModel(DecoderPasses, DeepSeekV3Model):
    """torchtitan's model with its `Routes` and our sizes."""

    routes: Routes
    sizes: DeepseekV3Config

    def hf_views(self) -> dict[str, Tensor]:
        """The live parameters by Hugging Face name; experts are stacked, and shown one by one."""
        views = ends_views(self)
        for index, block in enumerate(self.layers.values()):
            layer: Any = block
            prefix = f"model.layers.{index}"
            views |= _attention_views(f"{prefix}.self_attn", layer.attention)
            views[f"{prefix}.input_layernorm.weight"] = layer.attention_norm.weight
            views[f"{prefix}.post_attention_layernorm.weight"] = layer.ffn_norm.weight
            views |= _moe_views(f"{prefix}.mlp", layer.moe) if layer.moe_enabled else {}
            views |= {} if layer.moe_enabled else feed_forward_views(f"{prefix}.mlp", layer.feed_forward)
        return {name: view.detach() for name, view in views.items()}


def build_model(config: DeepseekV3Config) -> DeepseekModel:
    """The model, float32, weights not initialised."""
    layers = build_mla_moe_layers(
        n_layers=config.n_layers,
        n_dense_layers=config.n_dense_layers,
        dim=config.dim,
        n_heads=config.n_heads,
        q_lora_rank=config.q_lora_rank or 0,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        mscale=1.0,  # set below, with the rope's
        dense_hidden_dim=config.ffn_dim,
        moe_hidden_dim=config.expert_dim,
        num_experts=config.n_experts,
        num_shared_experts=config.n_shared_experts,
        router_top_k=config.top_k,
        router_score_func="sigmoid",
        router_num_expert_groups=config.n_groups,
        router_num_limited_groups=config.top_k_groups,
        router_route_scale=config.weight_scale,
        router_route_norm=config.normalised_weights,
        attn_backend="flex",  # replaced below
        moe_comm_backend="standard",  # replaced below
        non_blocking_capacity_factor=None,
        linear_init={},  # torchtitan's own start is not used
        norm_init={},
        depth_init=lambda layer: {},
        depth_experts_init=lambda layer: {},
        rope=Rope.Config(
            dim=config.qk_rope_head_dim,
            max_seq_len=config.max_context_tokens,
            theta=config.rope_theta,
            frequencies=config.rope_scaling,
            interleaved=True,
        ),
    )
    for layer in layers:
        _replace_nodes(layer, config)
    model = DeepseekModel(
        DeepSeekV3Model.Config(
            vocab_size=config.vocab_size,
            dim=config.dim,
            norm=RMSNorm.Config(normalized_shape=config.dim, eps=config.norm_eps),
            tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.dim),
            lm_head=Head.Config(in_features=config.dim, out_features=config.vocab_size),
            layers=layers,
        )
    )
    model.sizes = config
    model.routes = Routes(config.moe_layers, config.top_k, config.n_experts)
    for index, block in enumerate(model.layers.values()):
        layer: Any = block
        layer.attention.inner_attention.layer = index
        layer.attention.softmax_scale *= _softmax_sharpness(config)
        if layer.moe_enabled:
            layer.moe.router.layer = index - config.n_dense_layers
            layer.moe.router.routes = model.routes
            # A parameter, so that weight updates carry it and put it back; nothing here learns it.
            layer.moe.expert_bias_E = nn.Parameter(torch.zeros(config.n_experts), requires_grad=False)
    return model


def _softmax_sharpness(config: DeepseekV3Config) -> float:
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return sharpness(scaling.factor, scaling.mscale_all_dim) ** 2


def _replace_nodes(layer: Any, config: DeepseekV3Config) -> None:
    """Put our attention, router and expert nodes into one block's config."""
    layer.attention.inner_attention = LatentAttention.Config()
    layer.attention.q_norm.eps = layer.attention.kv_norm.eps = _LATENT_EPS
    layer.attention_norm.eps = layer.ffn_norm.eps = config.norm_eps
    if layer.moe is None:
        return
    layer.moe.load_balance_coeff = None  # a balance loss instead of steps of the expert bias
    layer.moe.router = retype(ReplayRouter.Config, layer.moe.router)
    experts = layer.moe.routed_experts
    experts.inner_experts = retype(SplitExperts.Config, experts.inner_experts)
    experts.token_dispatcher = PermutingDispatcher.Config(num_experts=config.n_experts, top_k=config.top_k)


def _attention_views(prefix: str, attention: Any) -> dict[str, Tensor]:
    whole = {"q_proj": "wq"}
    compressed = {"q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b"}
    names = compressed if attention.q_lora_rank else whole
    names |= {"kv_a_proj_with_mqa": "wkv_a", "kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv_b", "o_proj": "wo"}
    return {f"{prefix}.{name}.weight": getattr(attention, module).weight for name, module in names.items()}


def _moe_views(prefix: str, moe: Any) -> dict[str, Tensor]:
    views = {f"{prefix}.gate.weight": moe.router.gate.weight}
    views[f"{prefix}.gate.e_score_correction_bias"] = moe.expert_bias_E
    views |= feed_forward_views(f"{prefix}.shared_experts", moe.shared_experts)
    experts = moe.routed_experts.inner_experts
    stacked = zip(experts.w1_EFD.unbind(0), experts.w3_EFD.unbind(0), experts.w2_EDF.unbind(0), strict=True)
    for expert, (gate, up, down) in enumerate(stacked):
        views[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate
        views[f"{prefix}.experts.{expert}.up_proj.weight"] = up
        views[f"{prefix}.experts.{expert}.down_proj.weight"] = down
    return views
