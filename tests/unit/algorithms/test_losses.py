"""Losses against their formulas, written out with plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms.losses import clipped_loss, masked_ratio_loss

# (p, q, A): inside the bounds, both masks, both signs on the harmless side, dual clip.
CASES = [
    (0.50, 0.50, 1.0),
    (0.90, 0.50, 1.0),
    (0.10, 0.50, -1.0),
    (0.90, 0.50, -1.0),
    (0.10, 0.50, 1.0),
    (0.80, 0.10, -0.5),
    (0.55, 0.50, -2.0),
    (0.30, 0.50, 0.0),
]


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new = torch.tensor([math.log(p) for p, _, _ in CASES], requires_grad=True)
    old = torch.tensor([math.log(q) for _, q, _ in CASES])
    return new, old, torch.tensor([a for _, _, a in CASES])


def test_masked_ratio_loss_equals_its_formula():
    expected = 0.0
    for p, q, a in CASES:
        masked = (a > 0 and p - q > 0.2) or (a < 0 and p - q < -0.2)
        expected += -(0.0 if masked else p / q * a) + 1e-3 * math.log(p / q) ** 2
    new, old, advantage = tensors()
    terms = masked_ratio_loss(new, old, advantage, denominator=7.0)
    assert terms.loss.item() == pytest.approx(expected / 7.0, rel=1e-5)
    assert terms.inactive_T.tolist() == [False, True, True, False, False, False, False, False]


def test_masked_tokens_keep_only_the_squared_term_in_their_gradient():
    new, old, advantage = tensors()
    masked_ratio_loss(new, old, advantage, denominator=1.0).loss.backward()
    assert new.grad is not None
    for index, (p, q, a) in enumerate(CASES):
        masked = index in (1, 2)
        expected = (0.0 if masked else -p / q * a) + 2e-3 * math.log(p / q)
        assert new.grad[index].item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_clipped_loss_equals_its_formula():
    expected, inactive = 0.0, []
    for p, q, a in CASES:
        r = p / q
        gain = min(r * a, min(max(r, 0.8), 1.28) * a)
        if a < 0:
            gain = max(gain, 3.0 * a)
        expected -= gain
        inactive.append((a > 0 and r > 1.28) or (a < 0 and (r < 0.8 or r > 3.0)))
    new, old, advantage = tensors()
    terms = clipped_loss(new, old, advantage, denominator=5.0)
    assert terms.loss.item() == pytest.approx(expected / 5.0, rel=1e-5)
    assert terms.inactive_T.tolist() == inactive


def test_clipped_tokens_have_no_gradient():
    new, old, advantage = tensors()
    terms = clipped_loss(new, old, advantage, denominator=1.0)
    terms.loss.backward()
    assert new.grad is not None
    assert torch.equal(new.grad == 0.0, terms.inactive_T | (advantage == 0.0))


@pytest.mark.parametrize("loss", [masked_ratio_loss, clipped_loss])
def test_a_loss_does_not_depend_on_how_tokens_are_split(loss):
    new, old, advantage = tensors()
    whole = loss(new, old, advantage, denominator=8.0).loss
    parts = [loss(new[s], old[s], advantage[s], denominator=8.0).loss for s in (slice(0, 3), slice(3, 3), slice(3, 8))]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)
