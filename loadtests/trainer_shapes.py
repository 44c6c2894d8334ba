"""Shapes of models whose training is measured, built with random weights where they will compute.

Weights are made on the device, one after another: a model of 30B parameters would not fit the memory of its host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.qwen3.model import build_model as build_dense
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model as build_moe
from slipstream.trainer.recompute import Checkpointing
from slipstream.trainer.sequence import TrainSequence, version_number

BASE = version_number(PolicyVersion(1, 0))


@dataclass(frozen=True)
class Shape:
    """What is measured of a model."""

    sizes: Any
    build: Callable[[Any], Any]
    lora: LoraConfig | None = None
    """Adapters alone are trained; all else is frozen, in bfloat16."""
    budget_tokens_per_s: float | None = None
    """On one H200, at a context of 16k."""
    budget_of_bare: float | None = None
    """Least part of the bare step's speed, there."""
    target_mfu: float | None = None
    """What to come near to, there."""
    checkpointing: Checkpointing = "selective"
    """What fits a card, unless the command says otherwise."""

    @property
    def moe(self) -> bool:
        return bool(self.sizes.moe_layers)


QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "max_context_tokens": 131072,
}
TINY: dict[str, Any] = {"vocab_size": 512, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}

SHAPES = {
    "tiny": Shape(
        MoeConfig(**TINY, n_experts=8, top_k=2, expert_dim=32, max_context_tokens=4096),
        build_moe,
    ),
    "tiny-dense": Shape(
        Qwen3Config(**TINY, ffn_dim=128, rope_theta=1e6, norm_eps=1e-6, max_context_tokens=4096, tied_embeddings=True),
        build_dense,
    ),
    "tiny-lora": Shape(
        MoeConfig(**TINY, n_experts=8, top_k=2, expert_dim=32, max_context_tokens=4096),
        build_moe,
        lora=LoraConfig(rank=4),
    ),
    "qwen3-0.6b": Shape(
        Qwen3Config(**QWEN3, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, ffn_dim=3072, tied_embeddings=True),
        build_dense,
        budget_tokens_per_s=24_000,
    ),
    "qwen3-30b-a3b-lora": Shape(
        MoeConfig(**QWEN3, dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, n_experts=128, top_k=8, expert_dim=768),
        build_moe,
        lora=LoraConfig(rank=16),
        budget_tokens_per_s=6_000,
        checkpointing="full",  # kept products of experts and adapters would be 90 GB beside 57 GiB of weights
    ),
    "moe-1b": Shape(  # 1.03B active of 4.9B: what fits one card with its optimizer
        MoeConfig(**QWEN3, dim=2048, n_layers=20, n_heads=16, n_kv_heads=4, n_experts=32, top_k=4, expert_dim=1024),
        build_moe,
        budget_of_bare=0.95,
        target_mfu=0.35,
    ),
}


def make_model(shape: Shape, device: torch.device, seed: int = 0, *, fp8: bool = False) -> Any:
    """Its model on a device: float32, or frozen in bfloat16 beside float32 adapters; with `fp8` it multiplies so."""
    with torch.device("meta"):
        model = shape.build(shape.sizes)
    frozen = shape.lora is not None and device.type != "cpu"
    fill(model, device, torch.bfloat16 if frozen else torch.float32, seed)
    if fp8:
        convert(model, Fp8Config())
    if shape.lora is not None:
        attach(model, shape.lora, seed)
        model.to(device)
    return model


@torch.no_grad()
def fill(model: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Give a model on `meta` memory and random weights, and its tables their values."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:  # a tied one once
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                if values.ndim == 1:
                    values.fill_(1.0)
                else:
                    values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            with torch.device(device):
                table = module._precompute_cache() if name == "cache" else torch.zeros_like(buffer, device=device)  # pyright: ignore
            module.register_buffer(name, table, persistent=False)


def make_sequence(shape: Shape, context: int, seed: int, *, replay: bool = True) -> TrainSequence:
    """A rollout of `context` inputs, all of whose tokens but the first are trained on.

    Its routes are spread evenly; without `replay` none is known.
    """
    rng = np.random.default_rng(seed)
    sizes = shape.sizes
    layers, experts, top_k = sizes.moe_layers, sizes.n_experts, sizes.top_k
    first = rng.integers(0, max(experts, 1), (context, layers, 1))
    rows = (first + np.arange(top_k) * (experts // max(top_k, 1))) % max(experts, 1)
    return TrainSequence(
        token_ids=rng.integers(0, sizes.vocab_size, context + 1).astype(np.int32),
        target_positions=np.arange(1, context + 1),
        engine_logps=np.full(context, -np.log(sizes.vocab_size), dtype=np.float32),
        sampled_at=np.full(context, BASE),
        kv_oldest=np.full(context, BASE),
        routes=RouteRows(rows.astype(np.uint8), 0, () if replay else ((0, context),)),
        advantage=1.0 if seed % 2 else -1.0,
    )
