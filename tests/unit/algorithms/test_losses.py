"""Losses of single tokens against their formulas, written out with plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms.losses import (
    cispo_loss,
    clipped_loss,
    icepop_loss,
    masked_ratio_loss,
    token_truncated_loss,
)

from .written_out import LOSSES, STEP, TOTALS, Sequence, clamp, gradient, tensors

SINGLE = [(p, q, sequence.advantage) for sequence in STEP for p, q in sequence.tokens]


def clipped_gain(r: float, a: float, low: float, high: float) -> tuple[float, bool]:
    """PPO's, and whether it has no gradient."""
    gain = min(r * a, clamp(r, 1 - low, 1 + high) * a)
    return gain, (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)


def test_masked_ratio_loss_equals_its_formula_and_gradient():
    expected, inactive, slopes = 0.0, [], []
    for p, q, a in SINGLE:
        masked = (a > 0 and p - q > 0.2) or (a < 0 and p - q < -0.2)
        expected += (-(0.0 if masked else p / q * a) + 1e-3 * math.log(p / q) ** 2) / 20
        slopes.append(((0.0 if masked else -p / q * a) + 2e-3 * math.log(p / q)) / 20)
        inactive.append(masked)
    tokens = tensors()
    terms = masked_ratio_loss(tokens, TOTALS)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert terms.inactive_T.tolist() == inactive
    assert True in inactive
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)


def test_the_masks_bounds_and_coefficient_are_those_asked_for():
    expected = 0.0
    for p, q, a in SINGLE:
        masked = (a > 0 and p - q > 0.01) or (a < 0 and p - q < -0.6)
        expected += (-(0.0 if masked else p / q * a) + 0.5 * math.log(p / q) ** 2) / 20
    terms = masked_ratio_loss(tensors(), TOTALS, mask_low=0.6, mask_high=0.01, kl_coefficient=0.5)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 3.0), (1, 0, 1.5)])
def test_ppo_and_dapo_are_the_mean_over_tokens_of_the_clipped_ratio(low: float, high: float, dual: float | None):
    expected, inactive, slopes = 0.0, [], []
    for p, q, a in SINGLE:
        r = p / q
        gain, clipped = clipped_gain(r, a, low, high)
        if dual is not None and a < 0:
            gain, clipped = max(gain, dual * a), clipped or r > dual
        expected -= gain / 20
        inactive.append(clipped)
        slopes.append(0.0 if clipped else -r * a / 20)
    tokens = tensors()
    terms = clipped_loss(tokens, TOTALS, clip_low=low, clip_high=high, dual_clip=dual)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert terms.inactive_T.tolist() == inactive
    for (p, q, _), slope, found in zip(SINGLE, slopes, gradient(tokens), strict=True):
        if p / q != 1.0 + high:  # on the edge itself either is right
            assert found == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_grpo_is_the_mean_over_sequences_of_their_tokens_means():
    expected = 0.0
    for sequence in STEP:
        gains = [clipped_gain(p / q, sequence.advantage, 0.2, 0.2)[0] for p, q in sequence.tokens]
        expected -= sum(gains) / len(gains) / 8
    terms = clipped_loss(tensors(), TOTALS, over="sequences")
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


def test_dr_grpo_divides_by_a_length_that_does_not_depend_on_what_was_sampled():
    expected = -sum(clipped_gain(p / q, a, 0.2, 0.2)[0] for p, q, a in SINGLE) / (8 * 16)
    terms = clipped_loss(tensors(), TOTALS, over="fixed_length", fixed_length_tokens=16)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


def test_cispo_clips_the_weight_and_takes_no_token_its_gradient():
    expected, slopes = 0.0, []
    for p, q, a in SINGLE:
        weight = clamp(p / q, 1 - 0.3, 1 + 0.5)
        expected -= weight * a * math.log(p) / 20
        slopes.append(-weight * a / 20)
    tokens = tensors()
    terms = cispo_loss(tokens, TOTALS, clip_low=0.3, clip_high=0.5)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)
    assert not terms.inactive_T.any()


def test_token_level_truncated_importance_sampling_caps_each_ratio():
    slopes = [-min(p / q, 1.5) * a / 20 for p, q, a in SINGLE]
    tokens = tensors()
    terms = token_truncated_loss(tokens, TOTALS, ratio_cap=1.5)
    terms.loss.backward()
    expected = sum(slope * math.log(p) for slope, (p, _, _) in zip(slopes, SINGLE, strict=True))
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)


def test_icepop_drops_tokens_whose_ratio_is_out_of_its_range_whatever_their_advantage():
    expected, dropped, slopes = 0.0, [], []
    for p, q, a in SINGLE:
        r = p / q
        kept = r if 0.5 <= r <= 5.0 else 0.0
        expected -= kept * a / 20
        slopes.append(-kept * a / 20)
        dropped.append(not 0.5 <= r <= 5.0)
    tokens = tensors()
    terms = icepop_loss(tokens, TOTALS)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert terms.inactive_T.tolist() == dropped
    assert sum(dropped) == 4
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_at_equal_probabilities_every_loss_has_the_plain_policy_gradient(name: str):
    """`-A grad log p`, with the weight that the mean gives the token: every algorithm starts from there."""
    step = (Sequence(1.5, ((0.4, 0.4), (0.7, 0.7))), Sequence(-0.5, ((0.2, 0.2), (0.9, 0.9), (0.5, 0.5))))
    tokens = tensors(step)
    LOSSES[name](tokens, TOTALS).loss.backward()
    weights = {"grpo": (1 / 2 / 8, 1 / 3 / 8), "gspo": (1 / 2 / 8, 1 / 3 / 8), "dr_grpo": (1 / 128, 1 / 128)}
    first, second = weights.get(name, (1 / 20, 1 / 20))
    assert gradient(tokens) == pytest.approx([-1.5 * first] * 2 + [0.5 * second] * 3, rel=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_tokens_that_are_masked_or_clipped_have_no_policy_gradient_and_the_others_have_one(name: str):
    tokens = tensors()
    options = {"kl_coefficient": 0.0} if name == "masked_ratio" else {}
    terms = LOSSES[name](tokens, TOTALS, **options)
    terms.loss.backward()
    without = [slope == 0.0 for slope in gradient(tokens)]
    assert without == (terms.inactive_T | (tokens.advantage_T == 0)).tolist()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_advantage_is_no_loss_but_for_the_default_losss_squared_term(name: str):
    step = tuple(Sequence(0.0, sequence.tokens) for sequence in STEP)
    squares = sum(math.log(p / q) ** 2 for sequence in step for p, q in sequence.tokens)
    expected = 1e-3 * squares / 20 if name == "masked_ratio" else 0.0
    assert LOSSES[name](tensors(step), TOTALS).loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_micro_batch_without_loss_tokens_has_a_loss_of_nought_that_backward_takes(name: str):
    for step in ((), (Sequence(1.0, ()), Sequence(-1.0, ()))):
        tokens = tensors(step)
        terms = LOSSES[name](tokens, TOTALS)
        terms.loss.backward()
        assert terms.loss.item() == 0.0
        assert terms.inactive_T.shape == (0,)


def test_lengths_that_do_not_add_up_are_refused():
    new, old = torch.zeros(3), torch.zeros(3)
    for advantages, lengths in (([1.0], [2]), ([1.0, 2.0], [3])):
        with pytest.raises(ValueError, match="lengths"):
            type(tensors()).of_lengths(new, old, advantages, lengths)
