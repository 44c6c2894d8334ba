"""Hugging Face names and shapes for the model's parameters, in place and without copies where the layout allows.

The fused query-key-value weight is stored by key-value head (`[kv heads, query heads a group + 2, head size, D]`) and
experts are stacked; `hf_views` shows both as the slices that Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from slipstream.common.disk import replace_file
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import MoeModel, build_model


def hf_views(model: MoeModel) -> dict[str, Tensor]:
    """Views into the live parameters by Hugging Face name. Query, key and value views are 4-D, the rest as named."""
    views = {"model.embed_tokens.weight": model.tok_embeddings.weight}
    for index, block in enumerate(model.layers.values()):
        layer: Any = block
        prefix = f"model.layers.{index}"
        attention = layer.attention
        qkv = attention.qkv_linear
        fused = qkv.wqkv.weight.view(-1, qkv.r_dim, qkv.head_dim, model.sizes.dim)
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
    views |= {"model.norm.weight": model.norm.weight, "lm_head.weight": model.lm_head.weight}
    return {name: view.detach() for name, view in views.items()}


def to_hf(model: MoeModel) -> dict[str, Tensor]:
    """Contiguous float32 tensors by Hugging Face name. Some share memory with the live parameters: copy to keep."""
    return {
        name: (view.reshape(-1, view.shape[-1]) if view.ndim > 2 else view).contiguous()
        for name, view in hf_views(model).items()
    }


@torch.no_grad()
def load_hf(model: MoeModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the live parameters. Names and shapes must match exactly; nothing is written if they do not."""
    views = hf_views(model)
    if views.keys() != tensors.keys():
        missing, extra = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
        raise ValueError(f"state dict does not match the model: missing {missing[:3]}, unexpected {extra[:3]}")
    for name, view in views.items():
        expected = (view.numel() // view.shape[-1], view.shape[-1]) if view.ndim > 2 else tuple(view.shape)
        if tuple(tensors[name].shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, expected {expected}")
    for name, view in views.items():
        view.copy_(tensors[name].view_as(view))


def save_model(model: MoeModel, model_dir: Path) -> None:
    """Write `config.json` and `model.safetensors`, each whole or not at all. Raises `DiskFull`."""
    model.sizes.save(model_dir)
    replace_file(model_dir / "model.safetensors", save(to_hf(model), metadata={"format": "pt"}))


def load_model(model_dir: Path, attention: Any = None) -> MoeModel:
    """Build the model of a model directory and load its weights."""
    model = build_model(MoeConfig.load(model_dir), attention)
    load_hf(model, load_file(model_dir / "model.safetensors"))
    return model
