"""Qwen3-MoE as torchtitan's module tree (`torchtitan.models.qwen3`), with nodes of our own where a CPU asks for them.

    model = build_model(config)
    init_weights(model, seed=0)
    documents = Documents.of_lengths([12, 17])      # 29 tokens laid end to end
    hidden_1TD = model.hidden(tokens_1T, documents.positions_1T, documents)
    logits_TV = model.logits(hidden_1TD[0])

`attention_masks` goes unread to the `ContextAttention` nodes: it is a `Context` (`models/base.py`), or None for a
right-padded batch `[B, L]`. `model.routes` (see `models/routing.py`) captures, replays and balances routes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.models.attention import ContextAttention
from slipstream.models.decoder import DecoderPasses, random_start, retype
from slipstream.models.head import Head
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.experts import PermutingDispatcher, SplitExperts
from slipstream.models.qwen3_moe.router import ReplayRouter
from slipstream.models.rope import Rope
from slipstream.models.routing import Routes
from slipstream.models.titan import Embedding, Qwen3Model, RMSNorm, build_qwen3_moe_layers


class MoeModel(DecoderPasses, Qwen3Model):
    """torchtitan's Qwen3 model with its `Routes` and our sizes."""

    routes: Routes
    sizes: MoeConfig

    def hf_views(self) -> dict[str, Tensor]:
        """The live parameters by Hugging Face name.

        The fused query-key-value weight is stored by key-value head (`[kv heads, query heads a group + 2, head size,
        D]`) and experts are stacked; both are shown as the slices that Hugging Face names, query, key and value 4-D.
        """
        views = {"model.embed_tokens.weight": self.tok_embeddings.weight}
        for index, block in enumerate(self.layers.values()):
            layer: Any = block
            prefix = f"model.layers.{index}"
            attention = layer.attention
            qkv = attention.qkv_linear
            fused = qkv.wqkv.weight.view(-1, qkv.r_dim, qkv.head_dim, self.sizes.dim)
            views |= {
                f"{prefix}.self_attn.q_proj.weight": fused[:, : qkv.heads_per_kv],
                f"{prefix}.self_attn.k_proj.weight": fused[:, qkv.heads_per_kv : qkv.heads_per_kv + 1],
                f"{prefix}.self_attn.v_proj.weight": fused[:, qkv.heads_per_kv + 1 :],
                f"{prefix}.self_attn.o_proj.weight": attention.wo.weight,
                f"{prefix}.self_attn.q_norm.weight": attention.q_norm.weight,
                f"{prefix}.self_attn.k_norm.weight": attention.k_norm.weight,
                f"{prefix}.input_layernorm.weight": layer.attention_norm.weight,
                f"{prefix}.post_attention_layernorm.weight": layer.ffn_norm.weight,
                f"{prefix}.mlp.gate.weight": layer.moe.router.gate.weight,
            }
            experts = layer.moe.routed_experts.inner_experts
            stacked = zip(experts.w1_EFD.unbind(0), experts.w3_EFD.unbind(0), experts.w2_EDF.unbind(0), strict=True)
            for expert, (gate, up, down) in enumerate(stacked):
                views |= {
                    f"{prefix}.mlp.experts.{expert}.gate_proj.weight": gate,
                    f"{prefix}.mlp.experts.{expert}.up_proj.weight": up,
                    f"{prefix}.mlp.experts.{expert}.down_proj.weight": down,
                }
        views |= {"model.norm.weight": self.norm.weight, "lm_head.weight": self.lm_head.weight}
        return {name: view.detach() for name, view in views.items()}


def build_model(config: MoeConfig) -> MoeModel:
    """The model, float32, weights not initialised."""
    layers = build_qwen3_moe_layers(
        n_layers=config.n_layers,
        dim=config.dim,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        moe_hidden_dim=config.expert_dim,
        num_experts=config.n_experts,
        top_k=config.top_k,
        attn_backend="flex",  # replaced below
        moe_comm_backend="standard",  # replaced below
        rope=Rope.Config(dim=config.head_dim, max_seq_len=config.max_context_tokens, theta=config.rope_theta),
    )
    for layer in layers:
        _replace_nodes(layer, config)
    model = MoeModel(
        Qwen3Model.Config(
            vocab_size=config.vocab_size,
            dim=config.dim,
            norm=RMSNorm.Config(normalized_shape=config.dim, eps=config.norm_eps),
            tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.dim),
            lm_head=Head.Config(in_features=config.dim, out_features=config.vocab_size),
            layers=layers,
        )
    )
    model.sizes = config
    model.routes = Routes(config.n_layers, config.top_k, config.n_experts)
    for index, block in enumerate(model.layers.values()):
        layer: Any = block
        layer.attention.inner_attention.layer = layer.moe.router.layer = index
        layer.moe.router.routes = model.routes
    return model


def _replace_nodes(layer: Any, config: MoeConfig) -> None:
    """Put our attention, router and expert nodes into one block's config."""
    layer.attention.inner_attention = ContextAttention.Config()
    for norm in (layer.attention_norm, layer.ffn_norm, layer.attention.qk_norm):
        norm.eps = config.norm_eps
    layer.moe.load_balance_coeff = None  # a balance loss instead of torchtitan's expert bias
    layer.moe.router = retype(ReplayRouter.Config, layer.moe.router)
    experts = layer.moe.routed_experts
    experts.inner_experts = retype(SplitExperts.Config, experts.inner_experts)
    experts.token_dispatcher = PermutingDispatcher.Config(num_experts=config.n_experts, top_k=config.top_k)


def init_weights(model: MoeModel, seed: int) -> None:
    """Random start, the same for the same seed."""
    random_start(model, seed, residual_outputs=("wo.weight", "w2_EDF"))
