"""Training of low-rank adapters: what gets one, what moves, and what its gradient is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.common.config import ConfigError
from slipstream.models.checkpoint import to_hf
from slipstream.models.lora.adapters import PREFIX, attach
from slipstream.models.lora.config import LoraConfig
from slipstream.trainer.loss_config import ClippedLossConfig
from slipstream.trainer.step import Learner

from .tiny import BASE, OPTIM, SIZES, sequence, tiny_model

LORA = LoraConfig(rank=4, alpha=8.0)
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"


def adapted(config: LoraConfig = LORA) -> Any:
    model = tiny_model()
    attach(model, config, 1)
    return model


def train(model: Any) -> dict[str, float]:
    batch = [sequence(i, advantage=(-1.0) ** i) for i in range(4)]
    learner = Learner(model, OPTIM, ClippedLossConfig())
    return learner.train([batch], step=1, loss_token_count=20, trained=BASE)


def test_an_adapter_that_was_just_made_changes_nothing():
    plain, model = to_hf(tiny_model()), adapted()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in to_hf(model).items())
    halves = model.adapters.tensors()
    assert all(not tensor.any() for name, tensor in halves.items() if name.endswith("lora_B.weight"))
    assert all(tensor.any() for name, tensor in halves.items() if name.endswith("lora_A.weight"))


def test_a_step_moves_adapters_alone():
    model = adapted()
    before = {name: tensor.clone() for name, tensor in to_hf(model, merged=False).items()}
    assert train(model)["grad_norm"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in to_hf(model, merged=False).items())
    merged = to_hf(model)
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name in model.adapters.modules}
    assert {f"{EXPERT}.weight", f"{QUERY}.weight"} <= moved
    assert not any("router" in name or "mlp.gate." in name or "embed" in name for name in moved)


def test_the_gradient_of_an_adapter_is_that_of_the_weight_it_is_added_to():
    whole, model = tiny_model(), adapted()
    train(whole)
    train(model)
    scale, experts = LORA.scale, "layers.1.moe.routed_experts.inner_experts"
    halves = {name: each for name, each in model.named_parameters() if each.requires_grad}
    weights: dict[str, Any] = dict(whole.named_parameters())
    pairs = {
        f"{experts}.w1_EFD": (halves[f"{experts}.w1_EFD_lora_a"], halves[f"{experts}.w1_EFD_lora_b"]),
        f"{experts}.w2_EDF": (halves[f"{experts}.w2_EDF_lora_a"], halves[f"{experts}.w2_EDF_lora_b"]),
        "layers.0.attention.wo.weight": (
            halves["layers.0.attention.wo.lora_a"],
            halves["layers.0.attention.wo.lora_b"],
        ),
    }
    for name, (a, b) in pairs.items():
        expected = scale * weights[name].grad @ initial(a, name).transpose(-2, -1)
        ratio = (b.grad * expected).sum() / (expected * expected).sum()  # gradients were scaled down to a norm
        assert (b.grad - ratio * expected).abs().max() < 1e-4 * b.grad.abs().max()
        assert a.grad is None or not a.grad.any()  # what it is multiplied with is zero


def initial(a: torch.Tensor, name: str) -> torch.Tensor:
    """The first half as it was when the gradient was taken."""
    fresh = dict(adapted().named_parameters())
    return fresh[f"{name}_lora_a" if name.endswith(("EFD", "EDF")) else name.replace("weight", "lora_a")]


def test_targets_are_groups_or_projections():
    attention = adapted(LoraConfig(rank=4, targets=("attention",))).adapters.modules
    assert len(attention) == 4 * SIZES.n_layers
    assert all(".self_attn." in name for name in attention)
    some = adapted(LoraConfig(rank=4, targets=("o_proj", "down_proj"))).adapters.modules
    assert {name.rpartition(".")[2] for name in some} == {"o_proj", "down_proj"}
    assert len(some) == SIZES.n_layers * (1 + SIZES.n_experts)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_prj",), "the model has no 'q_prj'; it has down_proj, gate_proj"),
        (("q_proj",), "q_proj, k_proj, v_proj are one matrix: name all or none"),
        (("mlp",), "the model has nothing of mlp"),
    ],
)
def test_a_target_that_cannot_be_is_named(targets, said):
    with pytest.raises(ConfigError, match=said):
        adapted(LoraConfig(targets=targets))


def test_halves_have_the_names_and_shapes_of_peft():
    halves = adapted().adapters.tensors()
    assert halves[f"{PREFIX}{EXPERT}.lora_A.weight"].shape == (4, SIZES.dim)
    assert halves[f"{PREFIX}{EXPERT}.lora_B.weight"].shape == (SIZES.expert_dim, 4)
    assert halves[f"{PREFIX}{QUERY}.lora_B.weight"].shape == (SIZES.n_heads * SIZES.head_dim, 4)
