"""Compares the kernels of experts with plain operators, run by triton's interpreter: a process of its own."""

from __future__ import annotations

import torch

from slipstream.models import expert_kernels, expert_rows
from slipstream.models.expert_rows import Gated, GatherRows, add_up

TOKENS, TOP_K, WIDTH = 9, 3, 200


def close(ours: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    assert ours.dtype == plain.dtype
    torch.testing.assert_close(ours.float(), plain.float(), rtol=bound, atol=bound)


def compare(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(TOKENS * TOP_K, WIDTH, generator=generator).to(dtype).requires_grad_()
    scores = torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()
    places = torch.randperm(TOKENS * TOP_K, generator=generator).view(TOKENS, TOP_K)
    weights = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    found = []
    for fused in (False, True):
        rows.grad = scores.grad = None
        if fused:
            out = add_up(rows, places, scores, dtype)
        else:
            out = (rows[places.reshape(-1)].view(TOKENS, TOP_K, WIDTH) * scores.unsqueeze(2)).sum(1).to(dtype)
        (out * weights).sum().backward()
        found.append([out.detach(), rows.grad, scores.grad])
    for plain, ours in zip(*found, strict=True):
        close(ours, plain, dtype)

    tokens = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    order = places.reshape(-1).argsort()
    found = []
    for devices in (set(), {"cpu"}):
        tokens.grad = None
        expert_rows.FUSED_ON.clear()
        expert_rows.FUSED_ON.update(devices)
        gathered = GatherRows.apply(tokens, order // TOP_K, places)
        (gathered * rows.detach()).sum().backward()  # pyright: ignore
        found.append(tokens.grad)
    close(found[1], found[0], dtype)

    gate, up = (torch.randn(7, WIDTH, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    found = []
    for fused in (False, True):
        gate.grad = up.grad = None
        out = Gated.apply(gate, up) if fused else torch.nn.functional.silu(gate) * up
        (out * weights[:7]).sum().backward()  # pyright: ignore
        found.append([out.detach(), gate.grad, up.grad])  # pyright: ignore
    for plain, ours in zip(*found, strict=True):
        close(ours, plain, dtype)


def compare_strided() -> None:
    """Rows, scores, gates and gradients that lie with gaps between them, or all in one place."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(TOKENS * TOP_K, 2 * WIDTH, generator=generator).requires_grad_()
    scores = torch.rand(TOP_K, TOKENS, generator=generator).requires_grad_()
    places = torch.randperm(TOKENS * TOP_K, generator=generator).view(TOKENS, TOP_K)
    found = []
    for fused in (False, True):
        both.grad = scores.grad = None
        left, right = both.chunk(2, dim=1)
        if fused:
            out = add_up(Gated.apply(left, right), places, scores.t(), torch.float32)  # pyright: ignore
        else:
            rows = torch.nn.functional.silu(left) * right
            out = (rows[places.reshape(-1)].view(TOKENS, TOP_K, WIDTH) * scores.t().unsqueeze(2)).sum(1)
        out.sum().backward()  # one number, at every place
        found.append([out.detach(), both.grad, scores.grad])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)  # scores' gradients are sums of 200


if __name__ == "__main__":
    expert_kernels.BLOCK = 64  # several, the last one in part
    for dtype in (torch.float32, torch.bfloat16):
        compare(dtype)
    compare_strided()
    none = add_up(torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), torch.float32)
    assert none.shape == (0, 8)
    print("alike")
