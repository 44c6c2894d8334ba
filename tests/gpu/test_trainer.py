"""The learner on a card against the same on a processor: gradients, FP8, offload, checkpoints, published copies.

python -m pytest tests/gpu/test_trainer.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows
from slipstream.models import turned
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3 import build_model as build_dense
from slipstream.models.qwen3 import init_weights as init_dense
from slipstream.models.qwen3.config import Qwen3Config
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.trainer.checkpoint_state import Target, load, save_async
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.config import ParallelConfig
from slipstream.trainer.host_copies import HostCopies
from slipstream.trainer.loss_config import MaskedRatioLossConfig
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.parallel.sharding import Passes
from slipstream.trainer.sequence import TrainSequence, version_number
from slipstream.trainer.step import Learner

COMMON: dict[str, Any] = {"vocab_size": 512, "dim": 256, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64}
DENSE = Qwen3Config(**COMMON, ffn_dim=512, rope_theta=1e6, norm_eps=1e-6, max_context_tokens=1024, tied_embeddings=True)
MOE = MoeConfig(**COMMON, n_experts=8, top_k=2, expert_dim=128, max_context_tokens=1024)
BASE = version_number(PolicyVersion(1, 0))
CARD, CPU = torch.device("cuda"), torch.device("cpu")
LENGTHS = ((200, 57, 300), (129,), (64, 448))
"""Of documents, in micro-batches."""

ROUNDED = 0.06
"""Of a gradient's length: what bfloat16 products may be off by."""
SUMS_IN_ANY_ORDER = 0.005
"""And kernels that add up as it comes."""
FP8_ROUNDED = 0.25
"""And products in FP8, as `tests/unit/models/test_fp8.py` bounds them on a processor."""


def model(kind: str, *, lora: bool = False, fp8: str | None = None) -> Any:
    if kind == "dense":
        built: Any = build_dense(DENSE)
        init_dense(built, 0)
    else:
        built = build_model(MOE)
        init_weights(built, 0)
    if fp8 is not None:
        convert(built, Fp8Config(backend=fp8))  # pyright: ignore[reportArgumentType]
    if lora:
        adapters = attach(built, LoraConfig(rank=8), 0)
        with torch.no_grad():  # the second halves start at zero, where the first have no gradient
            for index, name in enumerate(sorted(adapters.tensors())):
                generator = torch.Generator().manual_seed(index)
                tensor = adapters.tensors()[name]
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
    return built


def sequence(seed: int, length: int, kind: str) -> TrainSequence:
    rng = np.random.default_rng(seed)
    sizes = MOE if kind == "moe" else DENSE
    layers, top_k = sizes.moe_layers, sizes.top_k
    rows = rng.random((length, layers, max(sizes.n_experts, 1))).argsort(-1)[..., :top_k].astype(np.uint8)
    return TrainSequence(
        token_ids=rng.integers(0, sizes.vocab_size, length + 1).astype(np.int32),
        target_positions=np.arange(length // 3 + 1, length + 1),
        engine_logps=np.full(length - length // 3, -np.log(sizes.vocab_size), dtype=np.float32),
        sampled_at=np.full(length - length // 3, BASE),
        kv_oldest=np.full(length - length // 3, BASE),
        routes=RouteRows(rows, 0, ((0, length // 4),)),  # the first quarter is routed live
        advantage=1.0 if seed % 2 else -1.0,
    )


def batches(kind: str) -> list[list[TrainSequence]]:
    return [
        [sequence(10 * index + place, length, kind) for place, length in enumerate(lengths)]
        for index, lengths in enumerate(LENGTHS)
    ]


def learner(built: Any, device: torch.device, *, bfloat16: bool = False, **settings: Any) -> Learner:
    built.to(device)
    parallel = ParallelConfig(checkpointing=settings.pop("checkpointing", "none"))
    once = settings.pop("round_once", True)
    optim = OptimConfig(lr=1e-3, warmup_steps=0, **settings)
    passes = Passes(bfloat16=bfloat16, logits_bytes=4 * 512 * 100, round_once=once)  # a hundred rows at once
    return Learner(built, optim, MaskedRatioLossConfig(), parallel=parallel, passes=passes)


def train(of: Learner, kind: str, step: int = 1) -> dict[str, float]:
    given = batches(kind)
    count = sum(len(each.target_positions) for batch in given for each in batch)
    return of.train(given, step=step, loss_token_count=count, trained=BASE)


def gradient(of: Learner, kind: str) -> dict[str, torch.Tensor]:
    """Of one step whose learning rate does not matter."""
    figures = train(of, kind)
    assert figures["step_skipped"] == 0.0
    assert np.isfinite(figures["loss"])
    return {name: p.grad.float().cpu() for name, p in of.model.named_parameters() if p.grad is not None}


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Length of the difference of two gradients over that of the second."""
    names = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}
    assert names.keys() == expected.keys()
    difference = sum(float((names[name] - value).square().sum()) for name, value in expected.items())
    return (difference / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    """Gradients in float32 on the processor."""
    return {
        (kind, lora): gradient(learner(model(kind, lora=lora), CPU), kind)
        for kind in ("dense", "moe")
        for lora in (False, True)
    }


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_gradient_in_bfloat16_is_that_of_the_processor(kind, lora, checkpointing, reference):
    on_card = learner(model(kind, lora=lora), CARD, bfloat16=True, checkpointing=checkpointing)
    found = off(gradient(on_card, kind), reference[kind, lora])
    print(f"{kind} {'lora' if lora else 'full'} {checkpointing}: {found:.4f}")
    assert found < ROUNDED


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_weights_rounded_once_a_step_give_the_gradient_of_those_rounded_in_each_pass(kind, lora):
    found = []
    for once in (False, True):
        ours = learner(model(kind, lora=lora), CARD, bfloat16=True, checkpointing="selective", round_once=once)
        found.append([gradient(ours, kind), train(ours, kind, 2)["loss"]])
    (each, each_loss), (ours, loss) = found
    names = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in each.items()}
    difference = off(ours, names)
    print(f"{kind} {'lora' if lora else 'full'} rounded once: {difference:.6f}, next loss {abs(loss - each_loss):.2e}")
    assert difference < SUMS_IN_ANY_ORDER
    assert loss == pytest.approx(each_loss, abs=1e-3)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_queries_turned_at_once_give_the_gradient_of_plain_operators(kind, reference, monkeypatch):
    plain = gradient(learner(model(kind), CARD, bfloat16=True), kind)
    monkeypatch.setattr(turned, "FUSED_ON", {"cuda"})
    at_once = gradient(learner(model(kind), CARD, bfloat16=True), kind)
    ours, theirs = (off(found, reference[kind, False]) for found in (at_once, plain))
    print(f"{kind} turned at once {ours:.4f}, by plain operators {theirs:.4f}, apart {off(at_once, plain):.4f}")
    assert ours < 1.3 * theirs


def test_a_dense_model_in_float32_gives_the_processors_gradient(reference):
    found = off(gradient(learner(model("dense"), CARD), "dense"), reference["dense", False])
    print(f"float32: {found:.6f}")
    assert found < 1e-3


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_offload_changes_no_weight(kind):
    here = learner(model(kind), CARD, bfloat16=True)
    away = learner(model(kind), CARD, bfloat16=True, offload_state=True, offload_activations=True)
    away._offload._min_bytes = 1 << 14
    for step in (1, 2):
        for each in (here, away):
            train(each, kind, step)
    assert away._offload.moved_bytes > 0
    assert all(t.device == CPU for state in away.optimizer.state.values() for t in state.values())
    one, other = here.export(), away.export()
    # Adam's first steps are as large as the rate wherever a gradient is, however small: atomic sums may differ in sign.
    assert all(np.abs(one[name] - other[name]).mean() < 2e-4 for name in one)


@pytest.mark.parametrize("settings", [{}, {"offload_state": True}], ids=["on_card", "offloaded"])
def test_a_checkpoint_comes_back_as_it_was(settings, tmp_path: Path):
    first = learner(model("moe"), CARD, bfloat16=True, **settings)
    train(first, "moe")
    version = PolicyVersion(1, 1)
    store = CheckpointStore(tmp_path, keep_last=1)
    target = Target.of(store, version, {})
    save_async(first.model, first.optimizer, first.carried, target, None).wait()
    second = learner(model("moe"), CARD, bfloat16=True, **settings)
    train(second, "moe")  # a state to be overwritten
    saved = store.newest()
    assert saved is not None
    load(second.model, second.optimizer, second.carried, saved.path)
    one, other = first.export(), second.export()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    for name, state in first.optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(value, second.optimizer.state[name][key]), (name, key)


def test_what_is_published_is_of_its_version_while_the_next_step_runs():
    ours = learner(model("moe"), CARD, bfloat16=True)
    train(ours, "moe")
    expected = {name: array.copy() for name, array in ours.export().items()}
    begun = ours.begin_export()
    train(ours, "moe", 2)
    later = ours.begin_export()
    assert all(np.array_equal(begun.arrays()[name], expected[name]) for name in expected)
    assert any(not np.array_equal(later.arrays()[name], expected[name]) for name in expected)


def test_weights_wait_for_their_copies():
    """A copy that takes long, and a write that is asked for at once."""
    copies = HostCopies(CARD)
    weight = torch.zeros(1 << 28, device=CARD)  # 1 GiB
    for value in range(1, 4):
        begun = copies.begin({"weight": weight})
        copies.hold()
        weight.fill_(float(value))
        assert (begun.arrays()["weight"] == value - 1).all()


def test_documents_do_not_see_each_other():
    ours = learner(model("dense"), CARD, bfloat16=True)
    batch = batches("dense")[0]
    whole = ours.logps(batch)
    changed = sequence(77, len(batch[1].token_ids) - 1, "dense")
    others = ours.logps([batch[0], changed, batch[2]])
    first, second = (len(each.target_positions) for each in batch[:2])
    assert np.array_equal(whole[:first], others[:first])
    assert np.array_equal(whole[first + second :], others[first + second :])
    assert not np.array_equal(whole[first : first + second], others[first : first + second])


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("backend", ["auto", "emulated"])
def test_the_gradient_in_fp8_is_within_its_bound(kind, backend, reference):
    on_card = learner(model(kind, fp8=backend), CARD, bfloat16=True, checkpointing="selective")
    found = off(gradient(on_card, kind), reference[kind, False])
    print(f"{kind} fp8 {backend}: {found:.4f}")
    assert found < FP8_ROUNDED
