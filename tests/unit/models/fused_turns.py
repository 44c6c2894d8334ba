"""Compares the kernels of queries and keys with plain operators, run by triton's interpreter: a process of its own."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.models import turned
from slipstream.models.documents import Documents
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.models.rope import Rope
from slipstream.models.titan import RMSNorm
from slipstream.models.turned import Turned

LENGTHS = [9, 5]


def compare(heads: int, size: int) -> None:
    """In float32, then in bfloat16, which the kernel alone rounds once."""
    generator = torch.Generator().manual_seed(heads)
    rope = Rope.Config(dim=size, max_seq_len=64, theta=100.0).build()
    rope._init_self_buffers(buffer_device=torch.device("cpu"))
    norm = RMSNorm.Config(normalized_shape=size, eps=1e-4).build()
    positions = Documents.of_lengths(LENGTHS).positions_1T
    plain = torch.randn(1, sum(LENGTHS), heads, size, generator=generator)
    weight = torch.rand(size, generator=generator).add(0.5)
    towards = torch.randn(plain.shape, generator=generator)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        found = []
        for fused in (False, True):
            norm.weight.data.copy_(weight.to(dtype))
            norm.weight.grad = None
            x = plain.to(dtype, copy=True).requires_grad_()
            if fused:
                out: Any = Turned.apply(x, norm.weight, rope.cache, positions, norm.eps)
                assert out.dtype == dtype
            else:
                wide = norm(x.float())
                out = rope(wide, wide, positions)[0]
            (out.float() * towards).sum().backward()
            assert x.grad is not None
            assert norm.weight.grad is not None
            found.append([out.detach().float(), x.grad.float(), norm.weight.grad.clone()])
        for expected, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=bound, atol=bound * float(expected.abs().max()))


def compare_model() -> None:
    """A whole model under autocast, and that its kernels were asked."""
    sizes = MoeConfig(
        vocab_size=24, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, expert_dim=16, max_context_tokens=32
    )
    documents = Documents.of_lengths(LENGTHS)
    tokens = torch.arange(sum(LENGTHS)).remainder(24).unsqueeze(0)
    found = []
    for fused in (False, True):
        model: Any = build_model(sizes)
        init_weights(model, 0)
        if fused:
            for module in model.modules():
                turned.turn_at_once(module)
        asked = []
        own = Turned.apply
        turned.Turned.apply = lambda *given: asked.append(given) or own(*given)  # noqa: B023
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens, documents.positions_1T, documents)
        hidden.float().square().mean().backward()
        turned.Turned.apply = own
        assert len(asked) == (2 * sizes.n_layers if fused else 0)
        found.append({"hidden": hidden.detach().float()} | {name: p.grad for name, p in model.named_parameters()})
    for name, expected in found[0].items():
        if expected is not None:
            off = (found[1][name] - expected).norm() / expected.norm()
            assert off < 0.03, (name, off)


def main() -> None:
    turned.FUSED_ON.add("cpu")
    compare(heads=3, size=64)
    compare(heads=1, size=32)
    compare_model()
    print("alike")


main()
