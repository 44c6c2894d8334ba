"""The same products on a card: torchao's kernels, and DeepGEMM's for experts where it is installed, by itself or in
vLLM, whose CUDA wheel has a copy. In bfloat16.

T = tokens or rows routed to experts, sorted by expert; N, K = output and input features; E = experts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slipstream.common.config import ConfigError
from slipstream.models.fp8.blocks import BLOCK
from slipstream.models.projections import group_ends


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a weight: both sides must be whole blocks."""
    return not any(size % BLOCK for size in weight.shape[-2:])


def linear(x: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T` over the last dimension of `x`."""
    x_TK = x.reshape(-1, x.shape[-1]).bfloat16()
    tokens = x_TK.shape[0]
    x_TK = F.pad(x_TK, (0, 0, 0, -tokens % BLOCK))  # the gradient of the weight sums over whole blocks of them
    product = _torchao().linear.fp8_blockwise_mm.apply(x_TK, weight_NK.bfloat16(), BLOCK)
    return product[:tokens].view(*x.shape[:-1], weight_NK.shape[0]).type_as(x)


def grouped_linear(x_TK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """The same with each row's own expert."""
    multiply = _torchao().grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm
    weight_EKN = weight_ENK.bfloat16().transpose(-2, -1)
    return multiply(x_TK.bfloat16(), weight_EKN, group_ends(counts_E)).type_as(x_TK)


MOST_GROUPS = 16
"""Rows that one program of a rounding kernel takes."""


class _Torchao:
    def __init__(self) -> None:
        _find_deep_gemm()
        from torchao.prototype.blockwise_fp8_training import deepgemm_quant, kernels, linear
        from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

        _try_less(kernels, deepgemm_quant)
        self.linear: Any = linear
        self.grouped_mm: Any = grouped_mm


def _try_less(*modules: Any) -> None:
    """Leave torchao's kernels a few of the shapes that they compile and time at their first call, for each width.

    Of up to 45, a minute a kernel.
    """
    for kernel in (each for module in modules for each in vars(module).values()):
        configs = getattr(kernel, "configs", None)
        if isinstance(configs, list):
            small = (each for each in configs if each.kwargs.get("NUM_GROUPS", 1) <= MOST_GROUPS)
            kernel.configs = [each for each in small if each.num_warps == 4 and each.num_stages <= 4] or configs


def _find_deep_gemm() -> None:
    """Let torchao, which imports it by its own name, find the copy in vLLM."""
    if importlib.util.find_spec("deep_gemm") is None and importlib.util.find_spec("vllm") is not None:
        with suppress(ImportError):
            sys.modules["deep_gemm"] = importlib.import_module("vllm.third_party.deep_gemm")


@cache
def _torchao() -> _Torchao:
    try:
        return _Torchao()
    except ImportError as error:
        raise ConfigError(
            f"trainer.fp8 on a card takes torchao ({error}): pip install 'slipstream[fp8]', or backend = \"emulated\""
        ) from None
