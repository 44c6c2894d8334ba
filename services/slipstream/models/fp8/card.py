"""The same products on a card: torchao's kernels, and DeepGEMM's for experts where it is installed, by itself or in
vLLM, whose CUDA wheel has a copy. In bfloat16.

T = tokens or rows routed to experts, sorted by expert; N, K = output and input features; E = experts; R, M = rows of
experts without and with padding, D = width.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import torch
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
        # Its own read the ends of all experts on the processor, which waits for the card, and copy expert by expert.
        self.grouped_mm.pad_token_groups, self.grouped_mm.unpad_token_groups = padded, unpadded


def padded(
    rows_RD: Tensor, ends_E: Tensor, alignment_size: int = BLOCK, kernel_preference: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """torchao's `pad_token_groups`, with nothing read back: each expert's rows start at a multiple of the alignment.

    Returns rows, as many as there can be at most, and where each expert's begin and end, with zeros behind its own.
    """
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    room_E = (sizes_E + alignment_size - 1) // alignment_size * alignment_size
    room_ends_E = room_E.cumsum(0, dtype=torch.int32)
    starts_E = room_ends_E - room_E
    most = -(-(len(rows_RD) + len(ends_E) * alignment_size) // alignment_size) * alignment_size
    out_MD = rows_RD.new_zeros(most, rows_RD.shape[1])
    return out_MD.index_copy_(0, _places(ends_E, starts_E, len(rows_RD)), rows_RD), starts_E, room_ends_E


def unpadded(
    rows_MD: Tensor,
    ends_E: Tensor,
    starts_E: Tensor,
    count: int,
    alignment_size: int = BLOCK,
    kernel_preference: Any = None,
) -> Tensor:
    """torchao's `unpad_token_groups`: the rows that `padded` was given, of what was made of what it gave."""
    return rows_MD.index_select(0, _places(ends_E, starts_E, count))


def _places(ends_E: Tensor, starts_E: Tensor, count: int) -> Tensor:
    """Where rows lie that begin at `starts_E`, and were one after another until `ends_E`."""
    row_R = torch.arange(count, dtype=ends_E.dtype, device=ends_E.device)
    shift_E = starts_E - ends_E + ends_E.diff(prepend=ends_E.new_zeros(1))
    return (row_R + shift_E[torch.bucketize(row_R, ends_E, right=True)]).to(torch.int64)


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
