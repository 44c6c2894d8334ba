"""Log-probabilities in chunks are those of all logits at once, and so are their gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.models.head import chunked_logps
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights

ROWS, WIDTH, VOCAB = 37, 24, 101


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator).to(dtype).requires_grad_() for n in (ROWS, VOCAB))
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    factor = torch.randn(ROWS, generator=generator)
    return hidden, weight, targets, temperature, factor


@pytest.mark.parametrize("with_temperature", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 8, ROWS - 1])
def test_chunks_give_the_same_values_and_gradients(chunk_rows: int, with_temperature: bool):
    found = []
    for rows in (0, chunk_rows):
        hidden, weight, targets, temperature, factor = inputs()
        logp, entropy = chunked_logps(hidden, weight, targets, temperature if with_temperature else None, rows)
        (logp * factor).sum().backward()
        assert not entropy.requires_grad
        assert hidden.grad is not None
        assert weight.grad is not None
        found.append((logp.detach(), entropy, hidden.grad, weight.grad))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_gradients_in_bfloat16_are_as_close_to_float32_as_without_chunks():
    exact, plain, chunked = [], [], []
    for found, dtype, rows in ((exact, torch.float32, 0), (plain, torch.bfloat16, 0), (chunked, torch.bfloat16, 8)):
        hidden, weight, targets, temperature, factor = inputs(torch.bfloat16)
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        logp, _ = chunked_logps(hidden, weight, targets, temperature, rows)
        assert logp.dtype == torch.float32
        (logp * factor).sum().backward()
        found += [x.grad.float() for x in (hidden, weight) if x.grad is not None]
    for reference, one, other in zip(exact, plain, chunked, strict=True):
        assert (other - reference).norm() <= 1.1 * (one - reference).norm()


def test_only_so_many_rows_of_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def watched(input: Tensor, weight: Tensor) -> Tensor:
        seen.append(len(input))
        return linear(input, weight)

    monkeypatch.setattr("slipstream.models.head.F.linear", watched)
    hidden, weight, targets, _, factor = inputs()
    logp, _ = chunked_logps(hidden, weight, targets, None, 8)
    (logp * factor).sum().backward()
    assert seen == [8, 8, 8, 8, 5] * 2


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_weights():
    hidden, weight, targets, _, factor = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = chunked_logps(hidden, weight, targets, None, 8)
    (logp * factor).sum().backward()
    assert logp.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    exact, _ = chunked_logps(hidden, weight, targets, None, 0)
    assert 0 < (logp - exact).abs().max() < 0.1


def test_a_model_gives_the_same_through_its_head():
    sizes = MoeConfig(
        vocab_size=50, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16, max_context_tokens=32
    )
    model = build_model(sizes)
    init_weights(model, 0)
    hidden = torch.randn(7, 32)
    targets = torch.arange(7)
    whole = torch.log_softmax(model.logits(hidden), -1)[targets, targets]
    for chunk_rows in (0, 3):
        logp, _ = model.target_logps(hidden, targets, chunk_rows=chunk_rows)
        torch.testing.assert_close(logp, whole)


def test_the_kernels_of_a_card_give_the_same():
    """By triton's interpreter, which is chosen before triton is imported."""
    program = Path(__file__).with_name("fused_head.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip().endswith("alike"), done.stderr[-2000:]
