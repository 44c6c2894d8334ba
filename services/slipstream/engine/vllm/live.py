"""The weights a vLLM model computes with, by Hugging Face names.

vLLM keeps them fused and, on the CPU, packed for its kernels. A linear layer is read through its own kernel, which
gives the weights back exactly when it is fed the unit vectors. Packed experts are compared with what was applied,
packed anew. What reads back equal to what was applied is given out as that, so that zeros keep their sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 1024
"""Unit vectors fed at once."""


class LiveWeights:
    """Reads a Qwen3-MoE model of vLLM, of one rank."""

    def __init__(self, model: nn.Module, applied: Mapping[str, Tensor]) -> None:
        self._modules = dict(model.named_modules())
        self._applied = applied
        self._config: Any = model.config

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter that was applied, as it is in use."""
        live = {
            "model.embed_tokens.weight": self._module("model.embed_tokens").weight,
            "model.norm.weight": self._module("model.norm").weight,
            "lm_head.weight": self._linear("lm_head"),
        }
        for layer in range(self._config.num_hidden_layers):
            live.update(self._layer(f"model.layers.{layer}"))
        if live.keys() != self._applied.keys():
            raise ValueError(f"the model has other weights: {sorted(live.keys() ^ self._applied.keys())[:3]}")
        return {name: self._signed(name, tensor) for name, tensor in live.items()}

    def _layer(self, prefix: str) -> dict[str, Tensor]:
        attention = f"{prefix}.self_attn"
        names = (f"{attention}.q_proj.weight", f"{attention}.k_proj.weight", f"{attention}.v_proj.weight")
        rows = [self._applied[name].shape[0] for name in names]
        live = dict(zip(names, self._linear(f"{attention}.qkv_proj").split(rows), strict=True))
        live[f"{attention}.o_proj.weight"] = self._linear(f"{attention}.o_proj")
        live[f"{prefix}.mlp.gate.weight"] = self._linear(f"{prefix}.mlp.gate")
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            live[f"{prefix}.{name}.weight"] = self._module(f"{prefix}.{name}").weight
        return live | self._experts(f"{prefix}.mlp.experts")

    def _linear(self, name: str) -> Tensor:
        """The matrix `[out, in]` of a linear layer, through its kernel."""
        module: Any = self._module(name)
        width = next(tensor.shape[1] for key, tensor in self._applied.items() if _belongs(key, name))
        columns = []
        for start in range(0, width, _ROWS):
            count = min(_ROWS, width - start)
            units = torch.zeros(count, width)
            units[torch.arange(count), start + torch.arange(count)] = 1
            columns.append(module.quant_method.apply(module, units))
        return torch.cat(columns).t().contiguous()

    def _experts(self, name: str) -> dict[str, Tensor]:
        """What was applied if the packed weights are just that, packed; else nothing that could be taken for it."""
        count = self._config.num_experts
        keys = [[f"{name}.{e}.{part}_proj.weight" for e in range(count)] for part in ("gate", "up", "down")]
        gate, up, down = (torch.stack([self._applied[key] for key in part]) for part in keys)
        layer: Any = next(
            module for key, module in self._modules.items() if key.startswith(name) and _is_experts(module)
        )
        packed: Any = nn.Module()
        packed.register_parameter("w13_weight", nn.Parameter(torch.cat((gate, up), dim=1), requires_grad=False))
        packed.register_parameter("w2_weight", nn.Parameter(down, requires_grad=False))
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(packed)
        good = [torch.equal(packed.w13_weight, layer.w13_weight)] * 2 + [torch.equal(packed.w2_weight, layer.w2_weight)]
        live = {}
        for equal, part in zip(good, keys, strict=True):
            for key in part:
                live[key] = self._applied[key] if equal else torch.full_like(self._applied[key], torch.nan)
        return live

    def _signed(self, name: str, live: Tensor) -> Tensor:
        applied = self._applied[name]
        live = live[: applied.shape[0]]  # vLLM pads the vocabulary
        return (applied if torch.equal(live, applied) else live).clone().contiguous()

    def _module(self, name: str) -> Any:
        return self._modules[name]


def _belongs(key: str, module: str) -> bool:
    """Whether a checkpoint's name is of a linear layer, fused or not."""
    prefix, _, last = module.rpartition(".")
    parts = ("q_proj", "k_proj", "v_proj") if last == "qkv_proj" else (last,)
    return any(key == (f"{prefix}.{part}.weight" if prefix else f"{part}.weight") for part in parts)


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "w13_weight") and hasattr(module, "quant_method")
