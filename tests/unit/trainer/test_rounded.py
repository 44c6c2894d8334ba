"""Weights rounded once a step: the same gradient as rounded in each pass, and never those of an earlier step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.common.version import PolicyVersion
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3 import build_model, init_weights
from slipstream.trainer.checkpoint_state import Target, load, save_async
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.config import ParallelConfig
from slipstream.trainer.loss_config import ClippedLossConfig
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.rounded import affordable
from slipstream.trainer.step import Learner

from .test_dense import SIZES as DENSE
from .tiny import BASE, OPTIM, sequence, tiny_model

BATCHES = [
    [sequence(1, length=12), sequence(2, length=9, advantage=-1.0)],
    [sequence(3, length=20)],
    [sequence(4, length=8, unknown_ranges=((2, 5),)), sequence(5, length=14, advantage=-1.0)],
]
COUNT = sum(len(s.target_positions) for batch in BATCHES for s in batch)


def dense() -> Any:
    model = build_model(DENSE)
    init_weights(model, 0)
    return model


def adapted() -> Any:
    model = tiny_model()
    attach(model, LoraConfig(rank=4), 1)
    return model


def in_fp8() -> Any:
    model = tiny_model()
    convert(model, Fp8Config())
    return model


MODELS: dict[str, Callable[[], Any]] = {"experts": tiny_model, "dense": dense, "lora": adapted, "fp8": in_fp8}


def learner(kind: str, checkpointing: str = "none", *, once: bool | None = True, **optim: Any) -> Learner:
    config = OPTIM.model_copy(update={"lr": 0.05, **optim})
    parallel = ParallelConfig.model_validate({"checkpointing": checkpointing})
    passes = Passes(bfloat16=True, round_once=once)
    return Learner(MODELS[kind](), config, ClippedLossConfig(), parallel=parallel, passes=passes)


def train(agent: Learner, step: int, scale: float = 1.0) -> dict[str, float]:
    batches = [[s if scale == 1.0 else _scaled(s, scale) for s in batch] for batch in BATCHES]
    return agent.train(batches, step=step, loss_token_count=COUNT, trained=BASE)


def _scaled(each: Any, scale: float) -> Any:
    return replace(each, advantage=each.advantage * scale)


def grads(agent: Learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in agent.model.named_parameters() if p.grad is not None}


class Seen:
    """Notes in each pass which linear layers and experts have copies, and that they are of the weights as they are."""

    def __init__(self, agent: Learner) -> None:
        self.rounded: set[str] = set()
        self.exact: set[str] = set()
        model: Any = agent.model
        for name, module in model.named_modules():
            own = {key: weight for key, weight in module.named_parameters(recurse=False) if weight.ndim > 1}
            if own and not isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(self._hook(name, own))

    def _hook(self, name: str, weights: dict[str, nn.Parameter]) -> Any:
        def note(module: nn.Module, _: Any) -> None:
            for key, weight in weights.items():
                taken = getattr(module, key)
                (self.exact if taken is weight else self.rounded).add(f"{name}.{key}")
                assert taken is weight or torch.equal(taken, weight.bfloat16()), f"{name}.{key} is of an earlier step"

        return note


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", MODELS)
def test_two_steps_are_those_of_weights_rounded_in_each_pass(kind, checkpointing, offload):
    optim = {"offload_activations": offload, "offload_state": offload}
    each, once = (learner(kind, checkpointing, once=once, **optim) for once in (False, True))
    for agent in (each, once):
        agent._offload._min_bytes = 1
    for step in (1, 2):
        one, other = train(each, step), train(once, step)
        assert one["loss"] == other["loss"]
        found, expected = grads(once), grads(each)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert found[name].dtype == torch.float32
            if kind == "dense" and "tok_embeddings" in name:  # it is the head, too: two sums in another order
                torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(found[name], grad), name


@pytest.mark.parametrize("kind", MODELS)
def test_linear_layers_and_experts_have_copies_in_passes_and_routers_and_fp8_none(kind):
    agent = learner(kind)
    seen = Seen(agent)
    train(agent, 1)
    assert all("router.gate" in name for name in seen.exact) or kind == "fp8"
    assert not any("router.gate" in name for name in seen.rounded)
    if kind == "fp8":
        assert {name for name in seen.rounded if "lm_head" not in name} == set()
    else:
        assert {"lm_head.weight", "layers.0.attention.wo.weight"} <= seen.rounded
    assert {p.dtype for p in agent.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("offload_state", [False, True])
@pytest.mark.parametrize("kind", ["experts", "dense", "lora"])
def test_passes_take_the_weights_of_their_step_whoever_wrote_them(kind, offload_state, tmp_path: Path):
    """After a step, one that was skipped, a restore, and weights of another model."""
    agent = learner(kind, "selective", offload_state=offload_state)
    seen = Seen(agent)
    before = train(agent, 1)["loss"]
    save_async(
        agent.model, agent.optimizer, {}, Target.of(CheckpointStore(tmp_path), PolicyVersion(1, 1), {}), None
    ).wait()
    moved = train(agent, 2)["loss"]
    assert moved != before
    assert train(agent, 3, scale=float("nan"))["step_skipped"] == 1.0
    train(agent, 3)
    load(agent.model, agent.optimizer, {}, tmp_path / "1.1")
    assert train(agent, 2)["loss"] == moved
    other = MODELS[kind]()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    agent.fill(other)
    train(agent, 3)
    assert seen.rounded


def test_a_pass_that_fails_leaves_the_weights_in_their_places():
    agent = learner("experts")
    weights = dict(agent.model.named_parameters())

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = agent.model.lm_head.register_forward_hook(fail)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(MemoryError):
        train(agent, 1)
    handle.remove()
    found = dict(agent.model.named_parameters())
    assert all(found[name] is weight for name, weight in weights.items())
    expected = learner("experts", once=False)
    train(expected, 1)
    train(agent, 1)
    assert all(torch.equal(grads(agent)[name], grad) for name, grad in grads(expected).items())


def test_copies_are_kept_where_a_quarter_of_what_is_free_beside_gradients_and_moments_has_room():
    gigabyte = 10**9
    assert affordable(copies_bytes=10 * gigabyte, learning=5 * gigabyte, free_bytes=130 * gigabyte)  # 4.9B on an H200
    assert affordable(16 * gigabyte, 0, 118 * gigabyte)  # adapters of 8B in float32
    assert not affordable(40 * gigabyte, 0, 70 * gigabyte)  # of 20B
    assert not affordable(10 * gigabyte, 5 * gigabyte, 90 * gigabyte)


@pytest.mark.parametrize(("said", "copies"), [(True, True), (False, False), (None, True)])
def test_whoever_says_nothing_has_copies_where_there_is_room(said, copies):
    agent = learner("experts", once=said)
    seen = Seen(agent)
    train(agent, 1)
    assert bool(seen.rounded) == copies


def test_published_weights_are_not_rounded():
    agent = learner("experts")
    train(agent, 1)
    assert any((torch.from_numpy(a).bfloat16().float().numpy() != a).any() for a in agent.export().values())


def test_the_kernel_of_a_card_adds_the_same():
    """By triton's interpreter, which is chosen before triton is imported."""
    program = Path(__file__).with_name("fused_sums.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip().endswith("alike"), done.stderr[-2000:]
