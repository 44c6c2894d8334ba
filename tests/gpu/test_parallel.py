"""Two cards compute what one does: loss, gradients, steps, checkpoints; and a rank that is gone is named.

    python -m pytest tests/gpu/test_parallel.py -s --device cuda     # two cards, NCCL
    python -m pytest tests/gpu/test_parallel.py -s                   # a rehearsal on a CPU, gloo

The ranks and what they do are those of tests/parallel.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.pool import Pool
from parallel.test_lost_ranks import WAYS
from parallel.test_one_gradient import PLAN, plan_of
from parallel.test_steps import SUMMED

Grads = dict[str, NDArray[np.float32]]

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"data": 2},
    "ep2": {"data": 2, "expert": 2},
    "ulysses2": {"context": 2, "context_kind": "ulysses"},
    "ring2": {"context": 2, "context_kind": "ring"},
    "ring2-ep2": {"context": 2, "context_kind": "ring", "expert": 2},
}
DENSE = [name for name in LAYOUTS if "ep2" not in name]
CASES = [*(("moe", name) for name in LAYOUTS), *(("dense", name) for name in DENSE), ("lora", "ep2")]
LOPSIDED = [[[], [], [], []], [batch for each in PLAN for batch in each][:4]]
"""Of two data ranks, one that trains nothing."""

FLOAT32, WRITTEN_OUT = 1e-5, 3e-5
"""Of the largest entry of each tensor: two cards against one; one card against the formulas on a CPU."""

BFLOAT16_NORM = 0.06
"""Of a tensor's norm, two cards against one, which round at other places."""
FURTHER = 1.5
"""Times as far from float32 as one card two may be."""


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="module")
def pool(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(2, tmp_path_factory.mktemp("pool"), device)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, Grads]]:
    """Loss and gradients of one card."""
    directory = tmp_path_factory.mktemp("one")

    @functools.cache
    def of(kind: str, bfloat16: bool = False) -> tuple[float, Grads]:
        path = str(directory / f"{kind}-{bfloat16}")
        (loss,) = pool.run("gradients", 1, kind=kind, layout={}, plan=plan_of(1), path=path, bfloat16=bfloat16)
        return loss, load_file(path)

    return of


def two(pool: Pool, kind: str, layout: str, path: Any, plan: Any = None, **how: Any) -> tuple[float, Grads]:
    """Of two."""
    degrees = LAYOUTS[layout]
    plan = plan or plan_of(degrees.get("data", 1))
    losses = pool.run("gradients", 2, kind=kind, layout=degrees, plan=plan, path=str(path), **how)
    assert losses[0] == losses[1]
    return losses[0], load_file(path)


def worst(found: Grads, expected: Grads) -> float:
    """The largest difference of an entry, as a part of the tensor's largest."""
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - grad).max() / np.abs(grad).max()) for name, grad in expected.items())


def apart(found: Grads, expected: Grads) -> float:
    """The largest distance of a tensor, as a part of its norm."""
    norm = np.linalg.norm
    return max(float(norm(found[name] - grad) / norm(grad)) for name, grad in expected.items())


@pytest.mark.parametrize("kind", ["moe", "dense", "lora"])
def test_one_card_computes_what_is_written_out(pool, one, kind, tmp_path):
    (loss,) = pool.run("reference", 1, kind=kind, plan=PLAN, path=str(tmp_path / "reference"))
    found = one(kind)
    difference = worst(found[1], load_file(tmp_path / "reference"))
    print(f"{kind}: one card against the formulas: {difference:.1e}")
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert difference < WRITTEN_OUT


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_two_cards_have_the_gradient_of_one(pool, one, kind, layout, tmp_path):
    found, expected = two(pool, kind, layout, tmp_path / "grads"), one(kind)
    difference = worst(found[1], expected[1])
    print(f"{kind} {layout} float32: {difference:.1e}")
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert difference < FLOAT32


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_in_bfloat16_two_cards_are_as_near_to_float32_as_one(pool, one, kind, layout, tmp_path):
    found, expected, exact = two(pool, kind, layout, tmp_path / "grads", bfloat16=True), one(kind, True), one(kind)
    difference = apart(found[1], expected[1])
    from_exact = apart(found[1], exact[1]), apart(expected[1], exact[1])
    figures = f"{difference:.1e} from one card; from float32 {from_exact[0]:.1e}, one card {from_exact[1]:.1e}"
    print(f"{kind} {layout} bfloat16: {figures}")
    assert found[0] == pytest.approx(expected[0], rel=0.02, abs=1e-3)
    assert difference < BFLOAT16_NORM
    assert from_exact[0] < FURTHER * from_exact[1] + 0.005


@pytest.mark.parametrize("layout", ["fsdp2", "ep2"])
def test_a_card_without_a_token_to_train_keeps_step(pool, layout, tmp_path):
    flat = [[batch for rank in LOPSIDED for batch in rank]]
    (loss,) = pool.run("gradients", 1, kind="moe", layout={}, plan=flat, path=str(tmp_path / "one"))
    found = two(pool, "moe", layout, tmp_path / "two", LOPSIDED)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert worst(found[1], load_file(tmp_path / "one")) < FLOAT32
    found = two(pool, "moe", layout, tmp_path / "two", LOPSIDED, bfloat16=True)
    assert apart(found[1], load_file(tmp_path / "one")) < 2 * BFLOAT16_NORM


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_what_is_computed_again_is_the_same(pool, one, checkpointing, tmp_path):
    found = two(pool, "moe", "ring2-ep2", tmp_path / "grads", checkpointing=checkpointing)
    assert worst(found[1], one("moe")[1]) < FLOAT32


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], Grads]:
    """Figures and weights of three steps of one card."""
    path = str(tmp_path_factory.mktemp("alone") / "weights")
    (figures,) = pool.run("steps", 1, kind="moe", layout={}, plan=plan_of(1), path=path)
    return figures, load_file(path)


def same_weights(found: Grads, expected: Grads) -> None:
    """Three steps of 1e-3 apart from what AdamW makes of gradients near 0."""
    for name in found.keys() - {"probe"}:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("how", [{}, {"filled": True}, {"filled": True, "offload": True}], ids=str)
@pytest.mark.parametrize("layout", ["fsdp2", "ep2", "ring2-ep2"])
def test_steps_of_two_cards_are_those_of_one(pool, alone, layout, how, tmp_path):
    degrees, path = LAYOUTS[layout], str(tmp_path / "weights")
    plan = plan_of(degrees.get("data", 1))
    figures = pool.run("steps", 2, kind="moe", layout=degrees, plan=plan, path=path, **how)
    for expected, found in zip(alone[0], figures[0], strict=True):
        for name in SUMMED:
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    found = load_file(path)
    same_weights(found, alone[1])
    np.testing.assert_allclose(found["probe"], alone[1]["probe"], atol=1e-3)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize(("before", "after"), [("ep2", None), (None, "ep2"), ("fsdp2", "ep2")])
def test_a_checkpoint_is_loaded_by_other_ranks_than_wrote_it(pool, alone, before, after, offload, tmp_path):
    where, path = str(tmp_path / "checkpoints"), str(tmp_path / "weights")
    for name, job, more in ((before, "saved", {}), (after, "resumed", {"path": path})):
        degrees = LAYOUTS[name] if name else {}
        plan = plan_of(degrees.get("data", 1))
        more = {"kind": "moe", "directory": where, "offload": offload, **more}
        pool.run(job, 2 if name else 1, layout=degrees, plan=plan, **more)
    same_weights(load_file(path), alone[1])


@pytest.mark.parametrize("layout", ["ulysses2", "ring2"])
def test_a_document_does_not_feel_its_neighbours(pool, layout, tmp_path):
    batch, path = [[1, 30, 20], [2, 17, 9], [3, 45, 40]], str(tmp_path / "logps")
    pool.run("logps", 2, kind="moe", layout=LAYOUTS[layout], batch=batch, perturbed=1, path=path)
    found, others = load_file(f"{path}-0"), np.r_[:20, 29:69]
    assert np.array_equal(found["before"][others], found["after"][others])
    assert (found["before"][20:29] != found["after"][20:29]).all()


@pytest.mark.parametrize(("how", "why"), WAYS)
def test_a_lost_rank_is_named(device, how, why, tmp_path):
    pool = Pool(2, tmp_path, device)
    try:
        started_s = time.monotonic()
        pool.start("interrupted", 2, collective_timeout_s=4.0, how=how, path=str(tmp_path / "roll"), silence_s=2.0)
        told = pool.answer(0, 60.0)
        print(how, told, f"{time.monotonic() - started_s:.1f} s with the start")
    finally:
        pool.close(grace_s=0.1)
    assert told["answer"]["ranks"] == [1]
    assert told["answer"]["message"] == f"rank 1 of the trainer {why}"
