"""The grouped kernel of experts: one product for all of them, in bfloat16, where there is one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8
"""Columns of bfloat16 that the kernel takes at a time; it refuses rows that are no multiple of them."""


def takes_kernel(x: Tensor) -> bool:
    """Whether these rows are for the kernel: on a card, unless float32 is asked for, or there are none."""
    half = x.dtype is not torch.float32 or x.is_meta or (x.is_cuda and torch.is_autocast_enabled("cuda"))
    return half and x.device.type != "cpu" and len(x) > 0


def grouped_product(x_Ri: Tensor, weight_Eoi: Tensor, ends_E: Tensor) -> Tensor:
    """`x @ weight.T` in bfloat16, each row with its own expert's; widths that the kernel does not take are padded."""
    out, wide = weight_Eoi.shape[1:]
    pad_out, pad_in = -out % ALIGNED, -wide % ALIGNED
    x_Ri, weight_Eoi = x_Ri.bfloat16(), weight_Eoi.bfloat16()
    if pad_in:
        x_Ri, weight_Eoi = F.pad(x_Ri, (0, pad_in)), F.pad(weight_Eoi, (0, pad_in))
    if pad_out:
        weight_Eoi = F.pad(weight_Eoi, (0, 0, 0, pad_out))
    product_Ro = torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        x_Ri, weight_Eoi.transpose(-2, -1), offs=ends_E
    )
    return product_Ro[:, :out] if pad_out else product_Ro
