"""Compares the kernels of the head with plain operators, run by triton's interpreter: a process of its own."""

from __future__ import annotations

import torch

from slipstream.models import head_kernels
from slipstream.models.head import FusedLogps, target_logps

ROWS, WIDTH, VOCAB = 7, 16, 150


def compare(dtype: torch.dtype, chunk_rows: int, with_temperature: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator).to(dtype).requires_grad_() for n in (ROWS, VOCAB))
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5 if with_temperature else None
    factor = torch.randn(ROWS, generator=generator)
    found = []
    for fused in (False, True):
        hidden.grad = weight.grad = None
        if fused:
            logp, entropy = FusedLogps.apply(hidden, weight, targets, temperature, chunk_rows)  # pyright: ignore
        else:
            logp, entropy = target_logps(hidden @ weight.T, targets, temperature)
        assert not entropy.requires_grad
        (logp * factor).sum().backward()
        found.append([x.detach().float() for x in (logp, entropy, hidden.grad, weight.grad) if x is not None])
    exact = dtype == torch.float32
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 5e-2)


if __name__ == "__main__":
    head_kernels.BLOCK = 64  # several, the last one in part
    for dtype in (torch.float32, torch.bfloat16):
        for chunk_rows in (0, 2, ROWS):
            for with_temperature in (False, True):
                compare(dtype, chunk_rows, with_temperature)
    none = FusedLogps.apply(
        torch.zeros(0, WIDTH), torch.zeros(VOCAB, WIDTH), torch.zeros(0, dtype=torch.int64), None, 4
    )
    assert none[0].shape == (0,)  # pyright: ignore
    print("alike")
