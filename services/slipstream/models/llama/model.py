"""Llama from torchtitan's parts (`torchtitan.models.llama3`), with our attention and rope nodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.models.attention import ContextAttention
from slipstream.models.decoder import DecoderPasses, dense_views, set_biases
from slipstream.models.head import Head
from slipstream.models.llama.config import LlamaConfig
from slipstream.models.rope import Rope
from slipstream.models.routing import Routes
from slipstream.models.titan import (
    Embedding,
    Llama3Model,
    Llama3TransformerBlock,
    RMSNorm,
    make_ffn_config,
    make_gqa_config,
)


class LlamaModel(DecoderPasses, Llama3Model):
    """torchtitan's model with our sizes. It has no routers, so its `Routes` hold nothing."""

    routes: Routes
    sizes: LlamaConfig

    def hf_views(self) -> dict[str, Tensor]:
        """The live parameters by Hugging Face name."""
        return dense_views(self)


def build_model(config: LlamaConfig) -> LlamaModel:
    """The model, float32, weights not initialised."""
    norm = RMSNorm.Config(normalized_shape=config.dim, eps=config.norm_eps)
    model = LlamaModel(
        Llama3Model.Config(
            vocab_size=config.vocab_size,
            dim=config.dim,
            norm=norm,
            tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.dim),
            lm_head=Head.Config(in_features=config.dim, out_features=config.vocab_size),
            layers=[_layer(config, norm) for _ in range(config.n_layers)],
            enable_weight_tying=config.tied_embeddings,
        )
    )
    model.sizes = config
    model.routes = Routes(0, 0, 0)
    for index, block in enumerate(model.layers.values()):
        layer: Any = block
        layer.attention.inner_attention.layer = index
    return model


def _layer(config: LlamaConfig, norm: RMSNorm.Config) -> Llama3TransformerBlock.Config:
    attention = make_gqa_config(
        dim=config.dim,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        wqkv_param_init={},  # torchtitan's own start is not used
        wo_param_init={},
        inner_attention=ContextAttention.Config(),
        rope=Rope.Config(
            dim=config.head_dim,
            max_seq_len=config.max_context_tokens,
            theta=config.rope_theta,
            frequencies=config.rope_scaling,
        ),
    )
    if config.attention_bias:
        set_biases(attention)
    return Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=attention,
        feed_forward=make_ffn_config(dim=config.dim, hidden_dim=config.ffn_dim, w1_param_init={}, w2w3_param_init={}),
    )
