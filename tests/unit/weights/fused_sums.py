"""Compares the kernel of sums with plain operators, run by triton's interpreter: a process of its own."""

from __future__ import annotations

import torch

from slipstream.weights.checksum import GAMMA, slice_checksum
from slipstream.weights.straight import sums, sums_kernel

CPU = torch.device("cpu")

if __name__ == "__main__":
    sums_kernel.BLOCK, sums_kernel.TURNS = 64, 4  # several programs a row, the last one in part
    torch.manual_seed(3)
    for width in (2, 4):
        for rows, size in ((1, 1), (3, 64), (2, 256), (2, 257), (1, 1000)):
            assert sums.alike(sums_kernel.row_sums, rows, size, width, CPU), (rows, size, width)
    values = torch.randn(3, 500)
    base = (sums.seed_of("w") + GAMMA) & sums.MASK
    bases = torch.tensor([base - (1 << 64) if base >> 63 else base])
    (total,) = sums_kernel.row_sums(values.view(torch.int32).view(1, -1), 0xFFFFFFFF, bases).tolist()
    assert total & sums.MASK == slice_checksum("w", values.numpy(), (3, 500), (0, 0))
    assert not sums.alike(lambda bits, mask, bases: sums_kernel.row_sums(bits, mask, bases) + 1, 1, 9, 2, CPU)
    print("alike")
