"""How far the engine's probabilities are from the trainer's, and why. numpy only.

With `d = log p - log q` of a sampled token (p trainer, q engine), `k3 = exp(d) - 1 - d` is a non-negative, unbiased
estimate of KL(q || p) (http://joschu.net/blog/kl-approx.html). Its mean over trained tokens is split by what the
token's context was computed with:

* numeric: everything at the trained version, so that only kernels and rounding differ;
* policy lag: token and all of its KV at one older version;
* stale KV: KV older than the weights that sampled the token.

Each part is the sum over its own tokens divided by *all* tokens: the parts add up to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"ratio_p50": 0.5, "ratio_p90": 0.9, "ratio_p99": 0.99, "ratio_p999": 0.999}


@dataclass(frozen=True)
class Mismatch:
    """Over the trained tokens of one step; all zero (ratios one) when there are none."""

    kl: float
    numeric: float
    policy_lag: float
    stale_kv: float
    numeric_fraction: float
    policy_lag_fraction: float
    stale_kv_fraction: float
    ratios: dict[str, float]
    """Quantiles of p / q by name, and `ratio_max`."""

    def metrics(self) -> dict[str, float]:
        """By the names used in step records."""
        return {
            "mismatch_kl": self.kl,
            "mismatch_numeric": self.numeric,
            "mismatch_policy_lag": self.policy_lag,
            "mismatch_stale_kv": self.stale_kv,
            "tokens_pure_fraction": self.numeric_fraction,
            "tokens_policy_lag_fraction": self.policy_lag_fraction,
            "tokens_stale_kv_fraction": self.stale_kv_fraction,
            **self.ratios,
        }


def pure_tokens(sampled_T: NDArray[np.int64], kv_oldest_T: NDArray[np.int64], trained: int) -> NDArray[np.bool_]:
    """Tokens whose whole context was computed at the trained version."""
    return (sampled_T == trained) & (kv_oldest_T == trained)


def mismatch(
    trainer_logp_T: NDArray[np.float32],
    engine_logp_T: NDArray[np.float32],
    sampled_T: NDArray[np.int64],
    kv_oldest_T: NDArray[np.int64],
    trained: int,
) -> Mismatch:
    """Split the mismatch. Versions are numbers that order as versions do; `trained` is that of the weights trained."""
    count = trainer_logp_T.size
    if count == 0:
        return Mismatch(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys([*QUANTILES, "ratio_max"], 1.0))
    log_ratio_T = trainer_logp_T.astype(np.float64) - engine_logp_T
    ratio_T = np.exp(log_ratio_T)
    # expm1: exp(d) - 1 loses all digits for the tiny d of numeric mismatch.
    k3_T = np.expm1(log_ratio_T) - log_ratio_T
    pure_T = pure_tokens(sampled_T, kv_oldest_T, trained)
    stale_T = kv_oldest_T < sampled_T
    lag_T = ~pure_T & ~stale_T
    quantiles = np.quantile(ratio_T, list(QUANTILES.values()))
    ratios = dict(zip(QUANTILES, map(float, quantiles), strict=True)) | {"ratio_max": float(ratio_T.max())}
    return Mismatch(
        kl=float(k3_T.mean()),
        numeric=float(k3_T[pure_T].sum() / count),
        policy_lag=float(k3_T[lag_T].sum() / count),
        stale_kv=float(k3_T[stale_T].sum() / count),
        numeric_fraction=float(pure_T.mean()),
        policy_lag_fraction=float(lag_T.mean()),
        stale_kv_fraction=float(stale_T.mean()),
        ratios=ratios,
    )
