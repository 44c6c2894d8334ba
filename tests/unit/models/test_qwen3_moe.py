"""The model tree: its size, its names, its packed layout, and routing replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

from slipstream.models.checkpoint import load_hf, load_model, save_model, to_hf
from slipstream.models.documents import Documents
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.models.registry import load_sizes

SIZES = MoeConfig(vocab_size=23, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, expert_dim=16)


def model(seed: int = 0):
    built = build_model(SIZES)
    init_weights(built, seed)
    return built


def test_the_demo_model_has_the_recipes_size():
    assert sum(p.numel() for p in build_model(MoeConfig(vocab_size=101)).parameters()) == 470_848


def test_names_and_values_are_those_of_torchtitans_adapter():
    built = model()
    config: Any = built.config
    expected = Qwen3StateDictAdapter(config, None).to_hf(built.state_dict())
    ours = to_hf(built)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_loading_is_in_place_and_a_bad_state_dict_changes_nothing(tmp_path):
    built, other = model(0), model(1)
    parameters = list(built.parameters())
    load_hf(built, to_hf(other))
    assert all(a is b for a, b in zip(parameters, built.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="shape"):
        load_hf(built, {**to_hf(model(0)), "lm_head.weight": torch.zeros(3, 3)})
    assert torch.equal(to_hf(built)["model.norm.weight"], to_hf(other)["model.norm.weight"])
    save_model(built, tmp_path)
    again = load_model(load_sizes(tmp_path), tmp_path)
    assert again.sizes == SIZES
    assert torch.equal(to_hf(again)["lm_head.weight"], to_hf(other)["lm_head.weight"])


def test_packed_documents_equal_a_padded_batch_forward_and_backward():
    lengths = [7, 3, 5, 1]
    tokens_BL = torch.randint(23, (4, 7), generator=torch.Generator().manual_seed(1))
    real_BL = torch.arange(7) < torch.tensor(lengths)[:, None]
    documents = Documents.of_lengths(lengths)
    padded, packed = model(), model()
    out = padded(tokens_BL)[real_BL]
    out_packed = packed(tokens_BL[real_BL].unsqueeze(0), documents.positions_1T, documents)[0]
    assert torch.allclose(out, out_packed, atol=1e-5)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weight).sum().backward()
    (out_packed * weight).sum().backward()
    for (name, a), b in zip(padded.named_parameters(), packed.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None, name
        assert torch.allclose(a.grad, b.grad, atol=1e-4), name


def test_experts_equal_their_formula_with_gradients():
    built = model()
    moe: Any = built.layers["0"].moe
    x = torch.randn(1, 9, 32, requires_grad=True)
    out = moe(x)
    scores = torch.softmax(nn.functional.linear(x[0], moe.router.gate.weight), -1)
    top, ids = scores.topk(2)
    experts = moe.routed_experts.inner_experts
    expected = torch.zeros(9, 32)
    for token in range(9):
        for weight, expert in zip(top[token] / top[token].sum(), ids[token], strict=True):
            hidden = nn.functional.silu(experts.w1_EFD[expert] @ x[0, token]) * (experts.w3_EFD[expert] @ x[0, token])
            expected[token] = expected[token] + weight * (experts.w2_EDF[expert] @ hidden)
    assert torch.allclose(out[0], expected, atol=1e-5)
    (a,) = torch.autograd.grad(out.square().sum(), x)
    (b,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.allclose(a, b, atol=1e-4)


def test_replay_takes_recorded_experts_where_known_and_routes_live_elsewhere():
    one, other = model(0), model(1)
    tokens = torch.randint(23, (1, 12), generator=torch.Generator().manual_seed(3))
    one.routes.begin(capture=True)
    one(tokens)
    recorded = one.routes.captured()
    other.routes.begin(capture=True)
    other(tokens)
    live = other.routes.captured()
    assert recorded.shape == (12, 2, 2)
    assert recorded.dtype == torch.uint8
    assert not torch.equal(recorded, live)
    other.routes.begin(replay_TLK=recorded, capture=True)
    other(tokens)
    assert torch.equal(other.routes.captured(), recorded)
    other.routes.begin(replay_TLK=recorded, known_T=torch.arange(12) < 5, capture=True)
    other(tokens)
    assert torch.equal(other.routes.captured()[:5], recorded[:5])
    assert torch.equal(other.routes.captured()[5:, 0], live[5:, 0])  # later layers see other inputs


def test_the_gates_gradient_under_replay_is_that_of_its_scores_of_the_recorded_experts():
    built = model()
    moe: Any = built.layers["0"].moe
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(4))
    scores = torch.softmax(nn.functional.linear(x[0], moe.router.gate.weight), -1)
    ids = scores.topk(2, largest=False).indices  # none of which it would choose
    built.routes.begin(replay_TLK=ids.to(torch.uint8).unsqueeze(1).expand(9, 2, 2))
    out = moe(x)
    taken = scores.gather(1, ids)
    weights = taken / taken.sum(1, keepdim=True)
    experts = moe.routed_experts.inner_experts

    def of(expert: int, row: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(experts.w1_EFD[expert] @ row) * (experts.w3_EFD[expert] @ row)
        return experts.w2_EDF[expert] @ hidden

    rows = [sum(weights[t, k] * of(int(ids[t, k]), x[0, t]) for k in range(2)) for t in range(9)]
    expected = torch.stack([torch.as_tensor(row) for row in rows])
    assert torch.allclose(out[0], expected, atol=1e-5)
    (found,) = torch.autograd.grad(out.square().sum(), moe.router.gate.weight)
    (written,) = torch.autograd.grad(expected.square().sum(), moe.router.gate.weight)
    assert written.abs().max() > 0
    assert (found - written).abs().max() <= 1e-5 * written.abs().max()


def test_the_gate_learns_under_replay_and_the_balance_loss_is_one_when_even():
    built = model()
    tokens = torch.arange(8).unsqueeze(0)
    even = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], -1).to(torch.uint8)
    built.routes.begin(replay_TLK=even.unsqueeze(1).expand(8, 2, 2), balance=True)
    out = built(tokens)
    assert float(built.routes.balance_loss().detach()) == pytest.approx(1.0, abs=1e-5)
    out.square().sum().backward()
    moe: Any = built.layers["1"].moe
    assert moe.router.gate.weight.grad.abs().sum() > 0


def test_sizes_survive_hugging_faces_config():
    assert MoeConfig.from_hf(SIZES.to_hf()) == SIZES
    with pytest.raises(ValueError, match="model_type"):
        MoeConfig.from_hf({"model_type": "llama"})


@pytest.mark.parametrize("change", [{}, {"n_experts": 3, "top_k": 1}, {"n_kv_heads": 4, "head_dim": 16, "dim": 64}])
def test_the_sizes_tell_the_number_of_parameters(change):
    sizes = MoeConfig(vocab_size=101, **change)
    assert sizes.parameter_count() == sum(parameter.numel() for parameter in build_model(sizes).parameters())
