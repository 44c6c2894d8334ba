"""torchtitan's own training step of the same sizes: what the RL step is measured against.

Its module tree with its own experts, router and dispatcher, its chunked cross-entropy, clipping and fused AdamW: no
replay, no log-probabilities, nothing published. Attention is flash attention for ragged documents, as in ours; on a
CPU, where torchtitan has none without a compiler, it is ours.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trainer_shapes import Shape, fill

from slipstream.models.attention import ContextAttention
from slipstream.models.light_import import light_imports
from slipstream.models.titan import (
    CosSinRoPE,
    Embedding,
    Linear,
    Module,
    Qwen3Model,
    Qwen3TransformerBlock,
    RMSNorm,
    build_qwen3_moe_layers,
    make_ffn_config,
    make_gqa_config,
)

with light_imports():
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.common import attention as titan_attention
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

CHUNKS = 8
"""Of the loss: torchtitan's default."""


class Flash(VarlenAttention):
    """torchtitan's, with whatever flash attention is active: its own would ask for one that may not be installed."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Same fields as torchtitan's."""

    def __init__(self, config: Config) -> None:
        from torch.nn.attention.varlen import varlen_attn  # it was left out of a light import

        Module.__init__(self)
        self.window_size = config.window_size
        titan_attention.varlen_attn = varlen_attn


class BareStep:
    """Model and optimizer; `run` takes one step over documents of equal length."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, *, checkpointing: str = "none") -> None:
        with torch.device("meta"):
            self.model: Any = Qwen3Model(_config(shape, device))
        fill(self.model, device, torch.float32, 0)
        if checkpointing != "none":
            with light_imports():
                from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
            (FullAC if checkpointing == "full" else SelectiveAC).Config().build().apply(self.model)
        self.model._skip_lm_head = True
        self._loss = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=CHUNKS))
        self._loss.set_lm_head(self.model.lm_head)
        self._adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._device, self._dtype = device, dtype

    def run(self, tokens_BL: Tensor, labels_BL: Tensor) -> float:
        """One step over so many micro-batches of one document each; returns the loss."""
        # Its router asks for float32, which on a CPU autocast does not know, and computes in anyway.
        warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
        self._adamw.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        valid = torch.tensor(float(labels_BL.numel()), device=self._device)
        for tokens_L, labels_L in zip(tokens_BL, labels_BL, strict=True):
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                hidden = self.model(tokens_L[None], self._positions(tokens_L)[None], self._masks(len(tokens_L)))
                loss, _ = self._loss(hidden, labels_L[None], valid)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._adamw.step()
        return float(total)

    def _positions(self, tokens_L: Tensor) -> Tensor:
        return torch.arange(len(tokens_L), device=self._device)

    def _masks(self, length: int) -> Any:
        if self._device.type == "cpu":
            return None
        ends = torch.tensor([0, length], dtype=torch.int32, device=self._device)
        return VarlenMetadata(ends, ends, length, length)


def _config(shape: Shape, device: torch.device) -> Any:
    sizes = shape.sizes
    rope = CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=sizes.max_context_tokens, theta=sizes.rope_theta)
    attention: Any = ContextAttention.Config() if device.type == "cpu" else Flash.Config()
    norm = RMSNorm.Config(normalized_shape=sizes.dim, eps=sizes.norm_eps)
    common = {"n_heads": sizes.n_heads, "n_kv_heads": sizes.n_kv_heads, "head_dim": sizes.head_dim, "dim": sizes.dim}
    if shape.moe:
        layers = build_qwen3_moe_layers(
            n_layers=sizes.n_layers,
            moe_hidden_dim=sizes.expert_dim,
            num_experts=sizes.n_experts,
            top_k=sizes.top_k,
            attn_backend="flex",  # replaced below
            moe_comm_backend="standard",
            rope=rope,
            **common,
        )
        for layer in layers:
            layer.attention.inner_attention = attention
    else:
        layers = [
            Qwen3TransformerBlock.Config(
                attention_norm=norm,
                ffn_norm=norm,
                attention=make_gqa_config(
                    wqkv_param_init={},
                    wo_param_init={},
                    inner_attention=attention,
                    rope=rope,
                    qk_norm=RMSNorm.Config(normalized_shape=sizes.head_dim, eps=sizes.norm_eps),
                    **common,
                ),
                feed_forward=make_ffn_config(
                    dim=sizes.dim, hidden_dim=sizes.ffn_dim, w1_param_init={}, w2w3_param_init={}
                ),
            )
            for _ in range(sizes.n_layers)
        ]
    return Qwen3Model.Config(
        vocab_size=sizes.vocab_size,
        dim=sizes.dim,
        norm=norm,
        tok_embeddings=Embedding.Config(num_embeddings=sizes.vocab_size, embedding_dim=sizes.dim),
        lm_head=Linear.Config(in_features=sizes.dim, out_features=sizes.vocab_size),
        layers=layers,
        enable_weight_tying=bool(getattr(sizes, "tied_embeddings", False)),
    )
