"""The example of a user's own loss and advantages computes what its docstrings say."""

from __future__ import annotations

import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.algorithms.advantages import Members

from .written_out import STEP, TOTALS, gradient, tensors

FILE = Path(__file__).parents[3] / "examples" / "own_algorithm.py"


@pytest.fixture(scope="module")
def own() -> ModuleType:
    spec = spec_from_file_location("own_algorithm", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_of_the_example_equals_its_formula(own: ModuleType):
    pairs = [(p, q, sequence.advantage) for sequence in STEP for p, q in sequence.tokens]
    expected = -sum(math.exp(0.5 * math.tanh(math.log(p / q) / 0.5)) * a for p, q, a in pairs) / 20
    tokens = tensors()
    terms = own.tanh_loss(tokens, TOTALS, softness=0.5)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert terms.inactive_T.tolist() == [abs(math.log(p / q)) > 1.5 for p, q, _ in pairs]
    assert [slope == 0.0 for slope in gradient(tokens)] == [a == 0.0 for _, _, a in pairs]


def test_the_advantages_of_the_example_are_ranks(own: ModuleType):
    assert own.ranks(Members([0.1, 5.0, 0.2], [1, 1, 1])) == pytest.approx([-1.0, 1.0, 0.0])
    assert own.ranks(Members([1.0, 0.0, 1.0, 0.0], [1] * 4), spread=3.0) == pytest.approx([2.0, -2.0, 2.0, -2.0])
    assert own.ranks(Members([0.5] * 3, [1] * 3)) == [0.0] * 3
