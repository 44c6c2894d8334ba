"""Whole optimizer steps of several ranks: the same figures and weights, and what one rank lacks all do without."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from parallel.test_one_gradient import PLAN, plan_of

SUMMED = (
    *("loss", "balance_loss", "grad_norm", "entropy", "masked_fraction", "loss_tokens", "mismatch_kl", "ratio_p99"),
    *("routes_unknown_fraction", "sequences", "sequences_lost", "expert_load_max", "logps_unknown", "model_flops"),
)
LAYOUTS = [
    {"data": 2, "expert": 2},
    {"data": 1, "expert": 2, "context": 2, "context_kind": "ulysses"},
    {"data": 2, "expert": 2, "context": 2, "context_kind": "ring"},
]


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Figures and weights of one rank that does it all."""
    path = tmp_path_factory.mktemp("alone") / "weights"
    (figures,) = pool.run("steps", 1, kind="moe", layout={}, plan=plan_of(1), path=str(path))
    return figures, load_file(path)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_come_out_the_same_under_every_layout(pool, alone, layout, tmp_path):
    path = tmp_path / "weights"
    ranks = layout["data"] * layout.get("context", 1)
    figures = pool.run("steps", ranks, kind="moe", layout=layout, plan=plan_of(layout["data"]), path=str(path))
    for step, (expected, found) in enumerate(zip(alone[0], figures[0], strict=True)):
        for name in SUMMED:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (step, name)
        assert found["sequences"] == sum(len(batch) for rank in PLAN for batch in rank)
        for other in figures[1:]:  # what all must decide alike
            assert other[step]["grad_norm"] == found["grad_norm"]
    weights = load_file(path)
    assert weights.keys() == alone[1].keys()
    for name, expected in alone[1].items():  # three steps of 1e-3; AdamW makes much of gradients near 0
        np.testing.assert_allclose(weights[name], expected, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_a_rollout_that_one_context_rank_lacks_is_lost_for_all(pool, kind):
    batch, layout = [[1, 30, 20], [2, 17, 9], [3, 45, 40]], {"context": 2, "context_kind": kind}
    (expected,) = pool.run("lost", 1, layout={}, batch=batch, losers=[[0, 2]])
    found = pool.run("lost", 2, layout=layout, batch=batch, losers=[[0], [2]])
    for rank in range(2):
        assert found[rank][1] == pytest.approx(expected[1], rel=1e-5)
        assert found[rank][0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-4)
    assert found[0][0]["sequences_lost"] == 2
    assert found[0][0]["sequences"] == 1
    assert found[0][0]["routes_unknown_fraction"] == 0
    assert found[0][0]["loss_tokens"] == 9


@pytest.mark.parametrize(
    ("before", "after", "offload"),
    [(LAYOUTS[0], LAYOUTS[1], False), ({}, LAYOUTS[0], True), (LAYOUTS[1], {}, False)],
    ids=str,
)
def test_ranks_that_never_had_weights_go_on_from_a_checkpoint(pool, alone, before, after, offload, tmp_path):
    where, path = str(tmp_path / "checkpoints"), str(tmp_path / "weights")
    for job, layout, more in (("saved", before, {}), ("resumed", after, {"path": path})):
        plan, ranks = plan_of(layout.get("data", 1)), layout.get("data", 1) * layout.get("context", 1)
        pool.run(job, ranks, kind="moe", layout=layout, plan=plan, directory=where, offload=offload, **more)
    found = load_file(path)
    for name in found:
        np.testing.assert_allclose(found[name], alone[1][name], rtol=0, atol=1e-4, err_msg=name)


def test_state_in_host_memory_starts_from_the_weights_that_ranks_were_given(pool, alone, tmp_path):
    path, how = tmp_path / "weights", {"filled": True, "offload": True}
    pool.run("steps", 2, kind="moe", layout=LAYOUTS[0], plan=plan_of(2), path=str(path), **how)
    found = load_file(path)
    for name in found:
        np.testing.assert_allclose(found[name], alone[1][name], rtol=0, atol=1e-4, err_msg=name)
