"""Every layout computes the loss and the gradient of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from parallel.pool import Pool

Grads = dict[str, NDArray[np.float32]]

TOLERANCE = 1e-5
"""Of the largest entry of each tensor."""

BFLOAT16 = 0.02
"""Of the length of each tensor's gradient, where sums are rounded in another order."""

PLAN: list[list[Any]] = [
    [[[1, 9, 1]], []],  # one trained token
    [[[2, 1010, 1000]], [[3, 40, 30], [4, 7, 2]]],  # a thousand and some
    [[], []],  # none
    [[[5, 60, 20, [10, 25]], [6, 33, 32]], [[7, 18, 9]]],  # rows 10 to 24 of the first route live
]
"""Of four data ranks: `[micro-batch][sequence]`, each a seed, a length, the trained tokens, and unknown rows."""


def plan_of(data: int) -> list[list[Any]]:
    """The same micro-batches for fewer ranks; of two, one keeps a single trained token."""
    return [[batch for each in PLAN[rank::data] for batch in each] for rank in range(data)]


def layouts() -> list[dict[str, Any]]:
    contexts = [{"context": 1}, *({"context": 2, "context_kind": kind} for kind in ("ulysses", "ring"))]
    all_of_them = [
        {"data": data, "expert": expert} | context for data in (1, 2, 4) for expert in (1, 2) for context in contexts
    ]
    return [each for each in all_of_them if each["data"] * each["context"] % each["expert"] == 0]


def name_of(layout: dict[str, Any]) -> str:
    kind = layout.get("context_kind", "")
    return f"data{layout['data']}-expert{layout['expert']}-{kind}{layout['context']}"


@pytest.fixture(scope="module")
def references(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, Grads]]:
    """Loss and gradients of one process, for each kind of model and loss."""
    directory, known = tmp_path_factory.mktemp("reference"), {}

    def of(kind: str, loss: str = "tokens") -> tuple[float, Grads]:
        if (kind, loss) not in known:
            path = directory / f"{kind}-{loss}"
            (value,) = pool.run("reference", 1, kind=kind, plan=PLAN, path=str(path), loss=loss)
            known[kind, loss] = value, load_file(path)
        return known[kind, loss]

    return of


def check(
    pool: Pool, reference: tuple[float, Grads], kind: str, layout: dict[str, Any], path: Path, **more: Any
) -> None:
    ranks = layout["data"] * layout["context"]
    losses = pool.run(
        "gradients", ranks, kind=kind, layout=layout, plan=plan_of(layout["data"]), path=str(path), **more
    )
    expected_loss, expected = reference
    assert losses == pytest.approx([expected_loss] * ranks, rel=1e-5)
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert np.abs(grad).max() > 0, name
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=TOLERANCE * np.abs(grad).max(), err_msg=name)


@pytest.mark.parametrize("layout", layouts(), ids=name_of)
def test_experts_learn_the_same_under_every_layout(pool, references, layout, tmp_path):
    check(pool, references("moe"), "moe", layout, tmp_path / "grads")


@pytest.mark.parametrize("layout", [each for each in layouts() if each["expert"] == 1], ids=name_of)
def test_a_dense_model_learns_the_same_under_every_layout(pool, references, layout, tmp_path):
    check(pool, references("dense"), "dense", layout, tmp_path / "grads")


@pytest.mark.parametrize("layout", [each for each in layouts() if each["data"] == 2], ids=name_of)
def test_adapters_learn_the_same_under_every_layout(pool, references, layout, tmp_path):
    check(pool, references("lora"), "lora", layout, tmp_path / "grads")


@pytest.mark.parametrize("kind", ["moe", "lora", "dense"])
@pytest.mark.parametrize("context", [{"context": 1}, {"context": 2, "context_kind": "ring"}], ids=str)
def test_a_model_that_only_one_rank_ever_had_whole_learns_the_same(pool, references, kind, context, tmp_path):
    layout = {"data": 2, "expert": 1 if kind == "dense" else 2} | context
    check(pool, references(kind), kind, layout, tmp_path / "grads", filled=True)


def test_a_rank_without_a_token_to_train_keeps_step(pool, tmp_path):
    plan = [[[], []], [[[2, 60, 30]], [[3, 40, 30], [4, 7, 2]]]]
    (expected,) = pool.run("reference", 1, kind="moe", plan=plan, path=str(tmp_path / "reference"))
    layout, path = {"data": 2, "expert": 2}, str(tmp_path / "found")
    assert pool.run("gradients", 2, kind="moe", layout=layout, plan=plan, path=path) == pytest.approx([expected] * 2)
    found = load_file(path)
    for name, grad in load_file(tmp_path / "reference").items():
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=TOLERANCE * np.abs(grad).max(), err_msg=name)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_what_is_computed_again_takes_the_same_routes(pool, references, checkpointing, kind, tmp_path):
    layout = {"data": 1, "expert": 2, "context": 2, "context_kind": kind}
    check(pool, references("moe"), "moe", layout, tmp_path / "grads", checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("context", [{"context": 1}, {"context": 2, "context_kind": "ring"}], ids=str)
def test_what_a_dense_model_computes_again_is_the_same(pool, references, checkpointing, context, tmp_path):
    layout = {"data": 2} | context
    check(pool, references("dense"), "dense", layout, tmp_path / "grads", checkpointing=checkpointing)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_compiled_blocks_learn_the_same(pool, references, kind, tmp_path):
    how = {"compile": True, "compile_backend": "aot_eager"}  # the other backend takes a C++ compiler, and minutes
    check(pool, references(kind), kind, {"data": 1, "context": 1}, tmp_path / "grads", **how)


@pytest.mark.parametrize("kind", ["moe", "lora", "dense"])
def test_ranks_that_gather_float32_learn_what_one_does_with_weights_rounded_once(pool, kind, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    (expected,) = pool.run("gradients", 1, kind=kind, layout={}, plan=plan_of(1), path=str(one), bfloat16=True)
    layout = {"data": 2, "expert": 1 if kind == "dense" else 2}
    found = pool.run("gradients", 2, kind=kind, layout=layout, plan=plan_of(2), path=str(two), bfloat16=True)
    assert found == pytest.approx([expected] * 2, rel=1e-3)
    ours, theirs = load_file(two), load_file(one)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert np.linalg.norm(ours[name] - grad) < BFLOAT16 * np.linalg.norm(grad), name


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_a_loss_of_whole_sequences_sees_them_whole(pool, references, kind, tmp_path):
    layout = {"data": 2, "context": 2, "context_kind": kind}
    check(pool, references("dense", "sequences"), "dense", layout, tmp_path / "grads", loss="sequences")


@pytest.mark.parametrize("layout", [each for each in layouts() if each["data"] == 1], ids=name_of)
def test_a_document_does_not_feel_what_its_neighbours_say(pool, layout, tmp_path):
    batch = [[1, 30, 20], [2, 17, 9], [3, 45, 40]]
    ranks = layout["context"]
    pool.run("logps", ranks, kind="moe", layout=layout, batch=batch, perturbed=1, path=str(tmp_path / "logps"))
    others = np.r_[:20, 29:69]
    for rank in range(ranks):
        found = load_file(tmp_path / f"logps-{rank}")
        before, after = found["before"], found["after"]
        assert (before[others] == after[others]).all()
        assert (before[20:29] != after[20:29]).all()
