"""Latent attention (DeepSeek-V3) on vLLM: what it keeps of a token, and what it makes of the weights after loading.

Keys and values are made of one narrow vector a token, which is all that the cache holds. Prompts are attended to with
keys and values made by `kv_b_proj`; single tokens with two matrices of each head cut out of it, `W_UK_T` and `W_UV`,
which vLLM makes once it has loaded. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.models.base import Sizes

CPU_BLOCK_TOKENS = 16
"""What vLLM makes of any block size there."""
CPU_WIDTHS = (512, 64)
"""Of the latent and of the part that turns: its kernel on the CPU takes no others."""
GPU_WIDTHS = ((128, 64, 128), (192, 64, 256), (64, 64, 128))
"""Of a head's key without and with what turns, and of its value: its kernel for prompts on a GPU takes no others."""


def latent_width(sizes: Sizes) -> int:
    """Numbers that a layer keeps of a token; 0 for a model that keeps keys and values."""
    rank: int = getattr(sizes, "kv_lora_rank", 0)
    return rank + int(getattr(sizes, "qk_rope_head_dim", 0)) if rank else 0


def check_latent(sizes: Sizes, connector: str, offloads: bool, quantization: str, device: str, dtype: str) -> None:
    """Refuse what vLLM computes otherwise for latent attention or not at all, and what nobody has tried with it."""
    if not latent_width(sizes):
        return
    for setting, value, most in (
        ("connector", connector, "none"),
        ("offload", "set" if offloads else "unset", "unset"),
        ("quantization", quantization, "none"),
    ):
        if value != most:
            raise ConfigError(f"engine.{setting} is {value!r}, and with latent attention only {most!r} was tried")
    if device == "cpu":
        _check_cpu(sizes)
    else:
        _check_gpu(sizes, dtype)


def _check_cpu(sizes: Sizes) -> None:
    widths = _widths(sizes, "kv_lora_rank", "qk_rope_head_dim")
    if widths != CPU_WIDTHS:
        raise ConfigError(f"kv_lora_rank and qk_rope_head_dim are {widths}; vLLM on the CPU takes {CPU_WIDTHS} alone")
    scaling = getattr(sizes, "rope_scaling", None)
    if scaling is None or scaling.rope_type != "yarn":
        raise ConfigError('rope_scaling is not of type "yarn", and vLLM on the CPU turns keys wrongly without it')


def _check_gpu(sizes: Sizes, dtype: str) -> None:
    if dtype == "float32":
        raise ConfigError('engine.dtype is "float32"; vLLM computes latent attention on a GPU in two bytes alone')
    widths = _widths(sizes, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if widths not in GPU_WIDTHS:
        known = ", ".join(map(str, GPU_WIDTHS))
        raise ConfigError(
            f"qk_nope_head_dim, qk_rope_head_dim and v_head_dim are {widths}; vLLM on a GPU takes {known} alone"
        )


def _widths(sizes: Sizes, *names: str) -> tuple[int, ...]:
    return tuple(getattr(sizes, name, 0) for name in names)


def latent_layers(model: Any) -> Iterator[Any]:
    """Those of a vLLM model's modules that attend so."""
    return (module for module in model.modules() if hasattr(module, "W_UK_T") and hasattr(module, "kv_b_proj"))


def cut_again(model: Any, dtype: Any) -> None:
    """Make the matrices of each head anew, in place, after `kv_b_proj` was filled in place."""
    for layer in latent_layers(model):
        layer.process_weights_after_loading(dtype)


def is_cut_of(layer: Any, weight: Any) -> bool:
    """Whether the matrices of each head are those of a `kv_b_proj` `[heads * (key + value), latent]`."""
    heads = weight.view(layer.num_heads, -1, weight.shape[1])
    keys, values = heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    alike = (keys == layer.W_UK_T).all() & (values.transpose(1, 2) == layer.W_UV).all()
    return bool(alike)
