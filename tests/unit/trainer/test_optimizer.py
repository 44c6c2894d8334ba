"""Optimizers, their groups, rates, and what is kept in host memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from slipstream.trainer.loss_config import ClippedLossConfig
from slipstream.trainer.muon import Muon, orthogonalise
from slipstream.trainer.offload import ActivationOffload
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.optimizer import ModelOptimizer
from slipstream.trainer.schedule import rate_factor
from slipstream.trainer.step import Learner

from .tiny import BASE, sequence, tiny_model


def optim(**fields: object) -> OptimConfig:
    return OptimConfig.model_validate({"warmup_steps": 0, "schedule": "constant", "lr": 1e-3, **fields})


def trained(config: OptimConfig, steps: int = 3) -> Learner:
    """A small model after some steps."""
    learner = Learner(tiny_model(), config, ClippedLossConfig())
    for step in range(1, steps + 1):
        batch = [sequence(10 * step), sequence(10 * step + 1, advantage=-1.0)]
        learner.train([batch[:1], batch[1:]], step=step, loss_token_count=10, trained=BASE)
    return learner


def test_rates_rise_and_then_follow_their_schedule():
    def rates(**fields: object) -> list[float]:
        config = OptimConfig.model_validate(
            {"warmup_steps": 4, "total_steps": 14, "final_lr_fraction": 0.1, "decay_steps": 5, **fields}
        )
        return [rate_factor(step, config) for step in range(1, 17)]

    for schedule in ("constant", "linear", "cosine", "wsd"):
        assert rates(schedule=schedule)[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates(schedule="constant")[4:] == [1.0] * 12
    linear = rates(schedule="linear")
    assert linear[4] == pytest.approx(1.0 - 0.9 / 10)
    assert linear[13] == linear[15] == pytest.approx(0.1)
    cosine = rates(schedule="cosine")
    assert cosine[8] == pytest.approx(0.55)
    assert cosine[13] == cosine[15] == pytest.approx(0.1)
    assert cosine[4:14] == sorted(cosine[4:14], reverse=True)
    wsd = rates(schedule="wsd")
    assert wsd[4:9] == [1.0] * 5
    assert wsd[9:14] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])


def test_muon_takes_the_steps_of_torchs_own():
    generator = torch.Generator().manual_seed(1)
    for shape in ((24, 64), (64, 24), (32, 32)):
        start = torch.randn(shape, generator=generator)
        mine, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        own = Muon([mine], lr=0.02, momentum=0.9, weight_decay=0.1)
        torchs = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            mine.grad = torch.randn(shape, generator=generator)
            theirs.grad = mine.grad.clone()
            own.step()
            torchs.step()
        moved = (theirs - start).abs().max()
        assert (mine - theirs).abs().max() < 0.01 * moved  # bfloat16, in another order


def test_experts_are_orthogonalised_one_by_one():
    stack = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(2))
    stack[2] *= 1000
    together = orthogonalise(stack)
    assert all(torch.allclose(together[index], orthogonalise(stack[index]), atol=0.02) for index in range(3))
    values = torch.linalg.svdvals(together)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_muon_has_the_matrices_and_adamw_the_rest():
    learner = trained(optim(algorithm="muon"), steps=1)
    kinds = {name: "muon" if "muon_momentum" in state else "adamw" for name, state in learner.optimizer.state.items()}
    assert kinds.keys() == dict(learner.model.named_parameters()).keys()
    layer = {"attention.qkv_linear.wqkv.weight", "attention.wo.weight"}
    layer |= {f"moe.routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
    of_muon = {name for name, kind in kinds.items() if kind == "muon"}
    assert of_muon == {f"layers.{number}.{name}" for number in (0, 1) for name in layer}


@pytest.mark.parametrize("algorithm", ["adamw", "sgd", "muon"])
def test_every_optimizer_learns(algorithm):
    learner = Learner(tiny_model(), optim(algorithm=algorithm, lr=3e-3), ClippedLossConfig())
    good, bad = sequence(1, advantage=1.0), sequence(2, advantage=-1.0)
    before = learner.logps([good]).sum() - learner.logps([bad]).sum()
    for step in range(1, 4):
        learner.train([[good, bad]], step=step, loss_token_count=10, trained=BASE)
    assert learner.logps([good]).sum() - learner.logps([bad]).sum() > before


def test_groups_have_rates_and_decays_of_their_own_and_the_first_that_matches_counts():
    config = optim(
        algorithm="sgd", momentum=0.0, weight_decay=0.0, lr=0.1,
        groups=[{"pattern": r"layers\.0\.", "lr_factor": 0}, {"pattern": "norm|gate", "lr_factor": 0.5},
                {"pattern": "lm_head", "weight_decay": 0.3}],
    )  # fmt: skip
    model = tiny_model()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = ModelOptimizer(model.named_parameters(), config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.step(1) == pytest.approx(0.1)
    moved = {name: (p - before[name]).detach() for name, p in model.named_parameters()}
    for name, change in moved.items():
        if name.startswith("layers.0."):
            assert not change.any()
        elif name == "lm_head.weight":
            assert torch.allclose(change, -0.1 * (1 + 0.3 * before[name]), atol=1e-6)
        else:
            assert torch.allclose(change, torch.tensor(-0.05 if "norm" in name or "gate" in name else -0.1), atol=1e-6)


def test_what_is_trained_is_float32_and_what_is_frozen_may_be_anything():
    model = tiny_model()
    low = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"low is torch\.bfloat16"):
        ModelOptimizer([*model.named_parameters(), ("low", low)], optim())
    low.requires_grad_(False)
    assert "low" not in ModelOptimizer([*model.named_parameters(), ("low", low)], optim()).parameters


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
def test_state_in_host_memory_changes_no_step(algorithm):
    here, host = (trained(optim(algorithm=algorithm, offload_state=offload)) for offload in (False, True))
    one, other = here.export(), host.export()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert host.optimizer.state.keys() == here.optimizer.state.keys()
    for name, state in here.optimizer.state.items():
        assert all(torch.equal(value, host.optimizer.state[name][key]) for key, value in state.items())


def test_muon_is_refused_beside_state_in_host_memory():
    with pytest.raises(ValidationError, match="offload_state: not with"):
        optim(algorithm="muon", offload_state=True)
    with pytest.raises(ValidationError, match="no regular expression"):
        optim(groups=[{"pattern": "("}])


def test_activations_in_host_memory_change_no_gradient_and_weights_stay():
    """On a processor "host memory" is a copy, so this shows the path and its arithmetic, not what it saves."""

    def gradients(offload: ActivationOffload) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(300, 200, generator=generator))
        x = torch.randn(50, 200, generator=generator, requires_grad=True)
        with offload.forward():
            loss = torch.tanh(torch.nn.functional.linear(x, weight)).pow(2).sum()
        loss.backward()
        return [g for g in (x.grad, weight.grad) if g is not None]

    plain, moved = ActivationOffload(enabled=False), ActivationOffload(enabled=True, min_bytes=1024)
    assert all(torch.equal(one, other) for one, other in zip(gradients(plain), gradients(moved), strict=True))
    assert plain.moved_bytes == 0
    assert 50 * 300 * 4 <= moved.moved_bytes < 300 * 200 * 4  # without the weight
    one, other = (trained(optim(offload_activations=offload), steps=1).export() for offload in (False, True))
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["adamw", "sgd", "muon"])
def test_a_loaded_state_goes_on_as_if_nothing_had_been(algorithm):
    whole, half = trained(optim(algorithm=algorithm), 3), trained(optim(algorithm=algorithm), 2)
    fresh = Learner(half.model, optim(algorithm=algorithm), ClippedLossConfig())
    fresh.optimizer.load_state({name: dict(state) for name, state in half.optimizer.state.items()})
    fresh.expert_share_LE = half.expert_share_LE
    batch = [sequence(30), sequence(31, advantage=-1.0)]
    fresh.train([batch[:1], batch[1:]], step=3, loss_token_count=10, trained=BASE)
    one, other = whole.export(), fresh.export()
    assert all(np.array_equal(one[name], other[name]) for name in one)
