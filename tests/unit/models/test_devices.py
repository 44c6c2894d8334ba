"""What a card computes: one device throughout, no wait for it, and the same numbers as far as a CPU can show.

Tensors on the device `meta` have no data: whatever would read some, or mix devices, fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models import attention
from slipstream.models.attention import causal, takes_ragged
from slipstream.models.deepseek_v3 import build_model as build_deepseek
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.models.documents import Documents
from slipstream.models.grouped import grouped_product
from slipstream.models.projections import group_ends, grouped_linear
from slipstream.models.qwen3 import build_model as build_qwen3
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.experts import SplitExperts
from slipstream.models.qwen3_moe.model import build_model as build_moe
from slipstream.models.titan import GroupedExperts

META, CPU = torch.device("meta"), torch.device("cpu")
LENGTHS = [5, 3, 8]


def test_ragged_attention_is_for_half_precision_on_a_card():
    assert takes_ragged(META, torch.bfloat16, 128)
    assert not takes_ragged(META, torch.float32, 128)
    assert not takes_ragged(META, torch.bfloat16, 320)
    assert not takes_ragged(CPU, torch.bfloat16, 128)


def test_starts_say_where_documents_lie():
    """Flash attention's own form of who sees whom: attention by `starts`, against the padded batch."""
    documents = Documents.of_lengths(LENGTHS)
    assert documents.starts.tolist() == [0, 5, 8, 16]
    assert documents.starts.dtype == torch.int32
    q, k, v = (torch.randn(1, 16, heads, 8) for heads in (4, 2, 2))
    pieces = zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True)
    alone = torch.cat([causal(q[:, a:b], k[:, a:b], v[:, a:b], None) for a, b in pieces], 1)
    torch.testing.assert_close(documents.attend(0, q, k, v, None), alone)


@pytest.mark.parametrize(("lengths", "ragged"), [([6, 5, 8], False), ([8, 8, 8], False), ([1, 1, 2, 8], True)], ids=str)
def test_documents_of_like_lengths_are_padded_on_a_card(lengths, ragged, monkeypatch):
    """There cuDNN's kernel is faster than the one for ragged documents."""
    asked = []

    def attend(q: Tensor, *_: object) -> Tensor:
        asked.append(q.shape)
        return q

    monkeypatch.setattr("slipstream.models.documents.takes_ragged", lambda *_: True)
    monkeypatch.setattr("slipstream.models.documents.ragged_causal", attend)
    q, k, v = (torch.randn(1, sum(lengths), heads, 8) for heads in (4, 2, 2))
    Documents.of_lengths(lengths).attend(0, q, k, v, None)
    assert bool(asked) == ragged


def test_documents_move_as_a_whole():
    moved = Documents.of_lengths(LENGTHS, META)
    assert {value.device for value in vars(moved).values() if isinstance(value, Tensor)} == {META}
    assert moved.shape == (3, 8)


def moe(vocab: int = 64) -> Any:
    return build_moe(
        MoeConfig(vocab_size=vocab, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, expert_dim=16)
    )


def deepseek() -> Any:
    return build_deepseek(
        DeepseekV3Config(
            vocab_size=64,
            dim=32,
            n_layers=2,
            n_dense_layers=1,
            n_heads=2,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            ffn_dim=16,
            expert_dim=16,
            n_experts=4,
            n_shared_experts=1,
            top_k=2,
            n_groups=1,
            top_k_groups=1,
            rope_theta=1e4,
            max_context_tokens=64,
            norm_eps=1e-6,
        )
    )


def dense() -> Any:
    return build_qwen3(
        Qwen3Config(
            architecture="qwen3",
            vocab_size=64,
            dim=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            ffn_dim=64,
            max_context_tokens=64,
            rope_theta=1e4,
            norm_eps=1e-6,
        )
    )


HALF = torch.bfloat16


@pytest.mark.parametrize(
    # Experts in float32 know no kernel on a card: rows are counted there, and read back.
    ("build", "dtype"),
    [(moe, HALF), (deepseek, HALF), (dense, HALF), (dense, torch.float32)],
)
def test_a_step_stays_on_its_device_and_reads_nothing_back(build: Any, dtype: torch.dtype):
    model = build().to(META, dtype)
    documents = Documents.of_lengths(LENGTHS, META)
    count = sum(LENGTHS)
    sizes = model.sizes
    rows = torch.zeros(count, sizes.moe_layers, sizes.top_k, dtype=torch.uint8, device=META)
    model.routes.begin(replay_TLK=rows if sizes.moe_layers else None, balance=True)
    hidden = model.hidden(torch.zeros(1, count, dtype=torch.int64, device=META), documents.positions_1T, documents)
    logps, entropy = model.target_logps(hidden[0], torch.zeros(count, dtype=torch.int64, device=META), None, 4)
    balance = model.routes.balance_loss()
    (logps.sum() + (balance if sizes.moe_layers else 0.0)).backward()
    assert {logps.device, entropy.device} == {META}
    assert all(p.grad is not None and p.grad.device == META for p in model.parameters() if p.requires_grad)
    if sizes.moe_layers:
        assert model.routes.choice_counts().device == META


def test_the_grouped_kernel_computes_what_the_loop_over_experts_does():
    config = SplitExperts.Config(dim=16, hidden_dim=24, num_experts=4)
    experts = SplitExperts(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    counts = torch.tensor([3, 0, 5, 2])  # one expert has no rows
    found = []
    for forward in (SplitExperts.forward, GroupedExperts.forward):
        x = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = forward(experts, x, counts)
        experts.zero_grad()
        (out * torch.arange(16.0)).sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in experts.parameters())])
    for loop, grouped in zip(*found, strict=True):
        assert (loop - grouped).norm() <= 0.02 * loop.norm()  # bfloat16


@pytest.mark.parametrize(("out", "wide"), [(4, 16), (24, 4), (5, 3), (16, 8)])
def test_widths_that_the_grouped_kernel_does_not_take_are_padded(out: int, wide: int):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(10, wide, generator=generator), torch.randn(4, out, wide, generator=generator)
    counts = torch.tensor([3, 0, 5, 2])
    found = []
    for product in (grouped_linear, lambda x, weight, counts: grouped_product(x, weight, group_ends(counts))):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        product(*inputs, counts).float().square().sum().backward()
        found.append([product(*inputs, counts).float().detach(), *(each.grad for each in inputs)])
    for loop, kernel in zip(*found, strict=True):
        assert kernel.shape == loop.shape
        assert (loop - kernel).norm() <= 0.02 * loop.norm()  # bfloat16


def test_heads_that_are_not_repeated_see_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    repeated = causal(q, k, v, None)
    monkeypatch.setattr(attention, "GROUPED_ON", {"cpu"})
    torch.testing.assert_close(causal(q, k, v, None), repeated)
