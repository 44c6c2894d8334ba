"""Losses of whole sequences against their formulas, written out with plain numbers."""

from __future__ import annotations

import math

import pytest

from slipstream.algorithms.sequence_losses import gspo_loss, sequence_truncated_loss

from .written_out import STEP, TOTALS, Sequence, clamp, gradient, tensors


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.5)])
def test_gspo_clips_the_mean_log_ratio_of_a_sequence(low: float, high: float):
    expected, inactive, slopes = 0.0, [], []
    for sequence in STEP:
        a, count = sequence.advantage, len(sequence.tokens)
        s = math.exp(sum(math.log(p / q) for p, q in sequence.tokens) / count)
        clipped = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low)
        expected -= min(s * a, clamp(s, 1 - low, 1 + high) * a) / 8
        inactive += [clipped] * count
        slopes += [0.0 if clipped else -s * a / count / 8] * count
    tokens = tensors()
    terms = gspo_loss(tokens, TOTALS, clip_low=low, clip_high=high)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert terms.inactive_T.tolist() == inactive
    assert True in inactive
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("cap", [2.0, 1.0, 50.0])
def test_sequence_level_truncated_importance_sampling_caps_the_product_of_the_ratios(cap: float):
    expected, slopes = 0.0, []
    for sequence in STEP:
        weight = min(math.prod(p / q for p, q in sequence.tokens), cap)
        for p, _ in sequence.tokens:
            expected -= weight * sequence.advantage * math.log(p) / 20
            slopes.append(-weight * sequence.advantage / 20)
    tokens = tensors()
    terms = sequence_truncated_loss(tokens, TOTALS, ratio_cap=cap)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert gradient(tokens) == pytest.approx(slopes, rel=1e-4, abs=1e-7)


def test_the_capped_weight_of_a_long_sequence_is_finite():
    tokens = tensors((Sequence(1.0, ((0.9, 1e-6),) * 40),))  # a product of 1e238, beyond float32
    terms = sequence_truncated_loss(tokens, TOTALS)
    terms.loss.backward()
    assert gradient(tokens) == pytest.approx([-2.0 / 20] * 40)
