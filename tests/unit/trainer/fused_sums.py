"""Compares the kernel that adds gradients up with plain operators, by triton's interpreter: a process of its own."""

from __future__ import annotations

import torch

from slipstream.trainer import rounded


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((3, 1500), (2, 7, 600), (0, 4)):
        total = torch.randn(shape, generator=generator)
        part = torch.randn(shape, generator=generator).bfloat16()
        expected = total + part.float()
        rounded.FUSED_ON.add("cpu")
        rounded.add_rounded(total, part)
        assert torch.equal(total, expected), shape
    turned = torch.randn(6, 5, generator=generator).bfloat16().t()  # not in one piece
    total = torch.zeros(5, 6)
    rounded.add_rounded(total, turned)
    assert torch.equal(total, turned.float())
    print("alike")


main()
