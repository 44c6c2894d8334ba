"""Reference KL, distillation, and tokens of which something is unknown, against formulas written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slipstream.algorithms.divergence import distillation_loss, kl_estimate
from slipstream.algorithms.losses import masked_ratio_loss
from slipstream.algorithms.objective import Objective
from slipstream.algorithms.tokens import LossTokens

from .written_out import LOSSES, STEP, TOTALS, Sequence, gradient, tensors

SINGLE = [(p, q, sequence.advantage) for sequence in STEP for p, q in sequence.tokens]
OTHERS = [0.5, 0.05, 0.9, 0.4, 0.3, 0.6, 0.45, 0.8, 0.1, 0.2, 0.35, 0.7]
"""Probabilities by the reference or the teacher; of some tokens the same as the trainer's."""


def others() -> torch.Tensor:
    return torch.tensor([math.log(u) for u in OTHERS])


def estimate(p: float, u: float, estimator: str) -> float:
    d = math.log(u / p)
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_equal_their_formulas_and_are_exact_on_average(estimator):
    new, other = torch.log(torch.tensor([0.2, 0.5, 0.3])), torch.log(torch.tensor([0.3, 0.5, 0.2]))
    found = kl_estimate(new, other, estimator)
    assert found.tolist() == pytest.approx([estimate(0.2, 0.3, estimator), 0.0, estimate(0.3, 0.2, estimator)])
    kl = 0.2 * math.log(0.2 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    if estimator != "k2":  # which is biased
        assert float((new.exp() * found).sum()) == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_kl_is_added_as_a_mean_over_tokens_and_pulls_towards_the_reference(estimator):
    tokens = replace(tensors(), reference_logp_T=others())
    plain = LOSSES["ppo"](tensors(), TOTALS).loss.item()
    terms = Objective(LOSSES["ppo"], 0.3, estimator)(tokens, TOTALS)
    kl = sum(estimate(p, u, estimator) for (p, _, _), u in zip(SINGLE, OTHERS, strict=True)) / 20
    assert terms.loss.item() == pytest.approx(plain + 0.3 * kl, rel=1e-5)
    k3 = sum(estimate(p, u, "k3") for (p, _, _), u in zip(SINGLE, OTHERS, strict=True)) / 20
    assert terms.figures["reference_kl"] == pytest.approx(k3, rel=1e-5)
    still = replace(tensors(tuple(Sequence(0.0, s.tokens) for s in STEP)), reference_logp_T=others())
    Objective(LOSSES["ppo"], 0.3, estimator)(still, TOTALS).loss.backward()
    slopes = {"k1": lambda d: 1.0, "k2": lambda d: -d, "k3": lambda d: 1 - math.exp(d)}
    expected = [0.3 * slopes[estimator](math.log(u / p)) / 20 for (p, _, _), u in zip(SINGLE, OTHERS, strict=True)]
    assert gradient(still) == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(("kl", "reward", "cap"), [(1.0, 0.0, 2.0), (0.5, 1.0, 2.0), (1.0, 0.0, 1.2)])
def test_distillation_weighs_each_token_by_how_much_likelier_the_teacher_finds_it(kl: float, reward: float, cap: float):
    tokens = replace(tensors(), teacher_logp_T=others())
    terms = distillation_loss(tokens, TOTALS, kl_coefficient=kl, reward_coefficient=reward, ratio_cap=cap)
    terms.loss.backward()
    expected, slopes = 0.0, []
    for (p, q, a), u in zip(SINGLE, OTHERS, strict=True):
        slopes.append(-min(p / q, cap) * (reward * a + kl * math.log(u / p)) / 20)
        expected += slopes[-1] * math.log(p)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-4)
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)
    gap = sum(math.log(p / u) for (p, _, _), u in zip(SINGLE, OTHERS, strict=True)) / 20
    assert terms.figures["teacher_kl"] == pytest.approx(gap, rel=1e-5)


def test_a_cap_bounds_what_the_teacher_says_of_a_token_and_not_the_figure():
    tokens = replace(tensors(), teacher_logp_T=others())
    terms = distillation_loss(tokens, TOTALS, gap_cap=0.2)
    terms.loss.backward()
    slopes = [
        -min(p / q, 2.0) * max(-0.2, min(0.2, math.log(u / p))) / 20
        for (p, q, _), u in zip(SINGLE, OTHERS, strict=True)
    ]
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)
    assert terms.figures == distillation_loss(tokens, TOTALS).figures


def test_what_a_loss_needs_and_does_not_get_is_named():
    with pytest.raises(ValueError, match="teacher"):
        distillation_loss(tensors(), TOTALS)
    with pytest.raises(ValueError, match="reference"):
        Objective(masked_ratio_loss, 0.1)(tensors(), TOTALS)


UNKNOWN = [math.nan, math.inf, -math.inf, 0.5, -1e30]


def without(index: int) -> tuple[Sequence, ...]:
    """The step without its token `index`."""
    left, at = [], 0
    for sequence in STEP:
        kept = tuple(pair for number, pair in enumerate(sequence.tokens, at) if number != index)
        at += len(sequence.tokens)
        left.append(Sequence(sequence.advantage, kept))
    return tuple(left)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("value", UNKNOWN)
@pytest.mark.parametrize("index", [0, 7])  # 7 is all that its sequence has
def test_a_token_of_unknown_probability_is_left_out_and_counted_and_the_others_are_trained(name, value, index):
    tokens = tensors()
    tokens.old_logp_T[index] = value
    terms = Objective(LOSSES[name])(tokens, TOTALS)
    terms.loss.backward()
    expected = tensors(without(index))
    alone = LOSSES[name](expected, TOTALS)
    alone.loss.backward()
    assert terms.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    assert terms.figures["logps_unknown"] == 1.0
    assert terms.inactive_T.tolist() == [
        *alone.inactive_T.tolist()[:index],
        True,
        *alone.inactive_T.tolist()[index:],
    ]
    slopes = gradient(expected)
    assert gradient(tokens) == pytest.approx([*slopes[:index], 0.0, *slopes[index:]], rel=1e-6)


@pytest.mark.parametrize("field", ["reference_logp_T", "teacher_logp_T"])
def test_what_reference_or_teacher_do_not_know_is_left_out_too(field: str):
    logps = others()
    logps[3] = math.nan
    tokens = replace(tensors(), **{"reference_logp_T": others(), "teacher_logp_T": others(), field: logps})
    terms = Objective(distillation_loss, 0.1)(tokens, TOTALS)
    terms.loss.backward()
    assert terms.figures["logps_unknown"] == 1.0
    assert math.isfinite(terms.loss.item())
    assert gradient(tokens)[3] == 0.0
    assert all(math.isfinite(slope) for slope in gradient(tokens))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_step_of_which_nothing_is_known_has_no_loss_and_no_gradient(name: str):
    tokens = replace(tensors(), old_logp_T=torch.full((12,), math.nan))
    terms = Objective(LOSSES[name])(tokens, TOTALS)
    terms.loss.backward()
    assert terms.loss.item() == 0.0
    assert gradient(tokens) == [0.0] * 12
    assert terms.inactive_T.all()
    assert terms.figures["logps_unknown"] == 12.0


def test_selecting_tokens_keeps_every_sequence_even_an_empty_one():
    tokens = tensors()
    chosen = tokens.select(tokens.sequence_T != 2)
    assert isinstance(chosen, LossTokens)
    assert chosen.sequence_count == 5
    assert chosen.sequence_T.tolist() == [0] * 4 + [1] * 3 + [3] * 2 + [4] * 2
