"""What holds for every loss, whatever the tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.objective import Objective
from slipstream.algorithms.tokens import LossTokens, StepTotals
from slipstream.trainer.loss_config import (
    CispoLossConfig,
    ClippedLossConfig,
    DapoLossConfig,
    DistillationLossConfig,
    DrGrpoLossConfig,
    GrpoLossConfig,
    GspoLossConfig,
    IcePopLossConfig,
    MaskedRatioLossConfig,
    PpoLossConfig,
    SequenceTruncatedLossConfig,
    TokenTruncatedLossConfig,
)
from slipstream.trainer.objective import LOSSES, build_objective

CONFIGS = [
    MaskedRatioLossConfig(reference_kl_coefficient=0.1),
    ClippedLossConfig(),
    PpoLossConfig(),
    GrpoLossConfig(),
    DrGrpoLossConfig(fixed_length_tokens=12),
    DapoLossConfig(),
    GspoLossConfig(),
    CispoLossConfig(),
    TokenTruncatedLossConfig(),
    SequenceTruncatedLossConfig(),
    IcePopLossConfig(),
    DistillationLossConfig(teacher=Path("unread")),
]

logps = st.floats(-8.0, -(2.0**-10), width=32)
sequences = st.lists(
    st.tuples(
        st.floats(-2.0, 2.0, width=32),
        # the engine's may be unknown
        st.lists(st.tuples(logps, logps | st.sampled_from([math.nan, math.inf, 0.5]), logps), max_size=5),
    ),
    min_size=1,
    max_size=6,
)


def evaluate(objective: Objective, batch: list, totals: StepTotals) -> tuple[float, float, list[float]]:
    """Loss, unknown tokens and gradient."""
    triples = [triple for _, tokens in batch for triple in tokens]
    new, old, other = (torch.tensor([triple[column] for triple in triples]) for column in range(3))
    new.requires_grad_()
    advantages, lengths = [a for a, _ in batch], [len(tokens) for _, tokens in batch]
    tokens = LossTokens.of_lengths(new, old, advantages, lengths, reference_logp_T=other, teacher_logp_T=other)
    terms = objective(tokens, totals)
    terms.loss.backward()
    assert new.grad is not None
    return terms.loss.item(), terms.figures["logps_unknown"], new.grad.tolist()


def test_every_built_in_loss_is_looked_at():
    assert {config.type for config in CONFIGS} == LOSSES.keys()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
@settings(max_examples=40, deadline=None)
@given(batch=sequences, data=st.data())
def test_a_step_has_one_loss_and_one_gradient_however_it_is_cut_into_micro_batches(config, batch, data):
    objective, totals = build_objective(config), StepTotals(30.0, 6.0)
    cut = data.draw(st.integers(0, len(batch)))
    loss, unknown, slopes = evaluate(objective, batch, totals)
    parts = [evaluate(objective, part, totals) for part in (batch[:cut], batch[cut:])]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert sum(part[1] for part in parts) == unknown
    assert parts[0][2] + parts[1][2] == pytest.approx(slopes, rel=1e-5, abs=1e-7)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, slopes))
