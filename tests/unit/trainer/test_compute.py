"""How a rank computes: logits in parts, products in bfloat16, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.config import ConfigError
from slipstream.trainer.compute import device_of, passes_of
from slipstream.trainer.config import ComputeConfig
from slipstream.trainer.frozen import FrozenModels
from slipstream.trainer.loss_config import GrpoLossConfig
from slipstream.trainer.parallel.sharding import Passes, shard, slice_for
from slipstream.trainer.parallel.world import World
from slipstream.trainer.step import Learner

from .tiny import BASE, OPTIM, SIZES, VOCAB, sequence, tiny_model

BATCHES = [[sequence(1, length=12), sequence(2, length=9, advantage=-1.0)], [sequence(3, length=20)]]
COUNT = sum(len(s.target_positions) for batch in BATCHES for s in batch)


def step(passes: Passes) -> tuple[dict[str, float], dict[str, np.ndarray], Learner]:
    frozen = FrozenModels(reference=tiny_model(seed=1))
    learner = Learner(tiny_model(), OPTIM, GrpoLossConfig(), frozen, passes=passes)
    figures = learner.train(BATCHES, step=1, loss_token_count=COUNT, trained=BASE)
    grads = {name: p.grad.numpy().copy() for name, p in learner.model.named_parameters() if p.grad is not None}
    return figures, grads, learner


def test_logits_in_parts_give_the_same_step():
    whole, whole_grads, _ = step(Passes())
    parts, parts_grads, _ = step(Passes(logits_bytes=3 * 4 * VOCAB))  # three rows at once
    for name in ("loss", "entropy", "grad_norm", "mismatch_kl", "reference_kl"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5)
    assert whole_grads.keys() == parts_grads.keys()
    for name, grad in whole_grads.items():
        np.testing.assert_allclose(parts_grads[name], grad, atol=1e-5 * np.abs(grad).max(), rtol=0, err_msg=name)


def test_bfloat16_products_leave_weights_gradients_and_log_probabilities_in_float32():
    exact, exact_grads, _ = step(Passes())
    rounded, grads, learner = step(Passes(bfloat16=True))
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    assert all(grad.dtype == np.float32 for grad in grads.values())
    assert learner.logps(BATCHES[0]).dtype == np.float32
    assert 0 < abs(rounded["loss"] - exact["loss"]) < 0.05
    whole = [np.concatenate([g[name].ravel() for name in sorted(exact_grads)]) for g in (exact_grads, grads)]
    assert np.linalg.norm(whole[0] - whole[1]) < 0.1 * np.linalg.norm(whole[0])


def test_autocast_rounds_no_router():
    routers = [module for name, module in tiny_model().named_modules() if name.endswith("router")]
    x_BLD = torch.randn(1, 7, SIZES.dim, generator=torch.Generator().manual_seed(0))
    assert len(routers) == SIZES.n_layers
    for router in routers:
        router.routes.begin()
        weights, ids, scores = router(x_BLD)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = router(x_BLD)
        assert all(torch.equal(one, other) for one, other in zip((weights, ids, scores), rounded, strict=True))


def test_what_is_published_is_float32_in_memory_of_its_own():
    *_, learner = step(Passes())
    published = learner.export()
    assert {tensor.dtype for tensor in published.values()} == {np.dtype(np.float32)}
    before = {name: tensor.copy() for name, tensor in published.items()}
    learner.train(BATCHES, step=2, loss_token_count=COUNT, trained=BASE)
    assert all(np.array_equal(published[name], before[name]) for name in before)


def test_a_card_that_is_not_there_is_refused_by_name():
    if torch.cuda.is_available():
        assert device_of(ComputeConfig(device="cuda")).type == "cuda"
    else:
        with pytest.raises(ConfigError, match="sees no card"):
            device_of(ComputeConfig(device="cuda"))
    assert device_of(ComputeConfig()) == torch.device("cpu")
    assert passes_of(ComputeConfig(precision="bfloat16", logits_bytes=4096)) == Passes(True, 4096, round_once=None)


def test_a_pass_stays_on_its_device_and_reads_nothing_back():
    """On `meta`, where whatever would read a value, or mix devices, fails."""
    model: Any = tiny_model()
    model.to("meta")
    ranked = shard(model, World(), passes=Passes(logits_bytes=3 * 4 * VOCAB))
    part = slice_for(ranked, BATCHES[0])
    share_LE = torch.full((SIZES.n_layers, SIZES.n_experts), 1.0 / SIZES.n_experts)
    for temperature_R in (None, torch.full((part.target_count,), 0.7)):
        logps_R, entropy_R = ranked.logps(part, temperature_R, share_LE=share_LE)
        (logps_R.sum() + model.routes.balance_loss()).backward()
        assert {logps_R.device.type, entropy_R.device.type} == {"meta"}
        assert all(p.grad is not None for p in model.parameters())
