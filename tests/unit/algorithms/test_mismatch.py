"""The three parts of mismatch against the k3 formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slipstream.algorithms.mismatch import mismatch

# (log p, log q, sampled at, oldest KV), trained version 7
TOKENS = [(-1.0, -1.00001, 7, 7), (-1.0, -1.2, 6, 6), (-0.5, -0.9, 7, 6), (-2.0, -1.5, 6, 5), (-0.1, -0.1, 7, 7)]


def k3(p: float, q: float) -> float:
    return math.exp(p - q) - 1.0 - (p - q)


def test_parts_follow_the_formula_and_add_up():
    p, q, sampled, oldest = (np.array(column) for column in zip(*TOKENS, strict=True))
    result = mismatch(p, q, sampled, oldest, trained=7)
    assert result.numeric == pytest.approx((k3(-1.0, -1.00001) + 0.0) / 5, rel=1e-3)
    assert result.policy_lag == pytest.approx(k3(-1.0, -1.2) / 5)
    assert result.stale_kv == pytest.approx((k3(-0.5, -0.9) + k3(-2.0, -1.5)) / 5)
    assert result.kl == pytest.approx(result.numeric + result.policy_lag + result.stale_kv)
    assert (result.numeric_fraction, result.policy_lag_fraction, result.stale_kv_fraction) == (0.4, 0.2, 0.4)
    assert result.ratios["ratio_max"] == pytest.approx(math.exp(0.4))
    assert result.ratios["ratio_p50"] == pytest.approx(math.exp(1e-5))


def test_no_tokens_is_no_mismatch():
    empty = np.zeros(0, np.float32)
    result = mismatch(empty, empty, empty.astype(np.int64), empty.astype(np.int64), trained=1)
    assert result.metrics()["mismatch_kl"] == 0.0
    assert result.metrics()["ratio_p999"] == 1.0
