"""Decoders without experts, of any family, from torchtitan's parts with our attention, rope and head."""

from __future__ import annotations

from typing import Any

from slipstream.models.attention import ContextAttention
from slipstream.models.decoder import set_biases
from slipstream.models.dense_config import DenseConfig
from slipstream.models.head import Head
from slipstream.models.rope import Rope
from slipstream.models.routing import Routes
from slipstream.models.titan import Embedding, RMSNorm, make_ffn_config, make_gqa_config


def build_dense(config: DenseConfig, model_class: Any, block_class: Any, *, qk_norm: bool) -> Any:
    """A `model_class` of `block_class` layers, float32, weights not initialised. Its `Routes` hold nothing.

    `qk_norm`: queries and keys of each head go through an RMS norm.
    """
    norm = RMSNorm.Config(normalized_shape=config.dim, eps=config.norm_eps)
    model = model_class(
        model_class.Config(
            vocab_size=config.vocab_size,
            dim=config.dim,
            norm=norm,
            tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.dim),
            lm_head=Head.Config(in_features=config.dim, out_features=config.vocab_size),
            layers=[_layer(config, block_class, norm, qk_norm) for _ in range(config.n_layers)],
            enable_weight_tying=config.tied_embeddings,
        )
    )
    model.sizes = config
    model.routes = Routes(0, 0, 0)
    for index, layer in enumerate(model.layers.values()):
        layer.attention.inner_attention.layer = index
    return model


def _layer(config: DenseConfig, block_class: Any, norm: RMSNorm.Config, qk_norm: bool) -> Any:
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
        qk_norm=RMSNorm.Config(normalized_shape=config.head_dim, eps=config.norm_eps) if qk_norm else None,
    )
    if config.attention_bias:
        set_biases(attention)
    return block_class.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=attention,
        feed_forward=make_ffn_config(dim=config.dim, hidden_dim=config.ffn_dim, w1_param_init={}, w2w3_param_init={}),
    )
