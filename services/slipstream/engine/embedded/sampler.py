"""Batched sampling whose draws depend on (seed, sample index, position) and nothing else.

Each row's uniform number is a hash of a key and a counter (SplitMix64), so there is no generator state to carry, to
lose at an update, or to be shared with whoever happens to be in the batch. One uniform number a row picks the token by
inverting the cumulative distribution.

B = rows of the batch, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample_key(seed: int, sample_index: int) -> int:
    """The 64-bit key of one sample's draws."""
    return _mix(_mix(seed & _MASK) + sample_index * _GOLDEN)


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), one for each (uint64 key, position)."""
    z = keys_B + positions_B.astype(np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits_BV: Tensor,
    uniforms_B: np.ndarray,
    temperature_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    top_k_B: Tensor | None = None,
    min_p_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probabilities under softmax(logits / temperature), nothing cut off.

    Arguments left out mean 1, or all; a row with temperature 0 is greedy, its log-probability that of temperature 1.
    """
    if temperature_B is not None:
        # From the largest down: near a temperature of 0 all others become minus infinity, and it stays 0.
        logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV / torch.where(temperature_B == 0, 1.0, temperature_B).unsqueeze(1)
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    weights_BV = logprobs_BV.exp()
    if min_p_B is not None:  # first: of the likelihoods at this temperature, whatever else is cut off
        least_B1 = min_p_B.unsqueeze(1) * weights_BV.amax(-1, keepdim=True)
        weights_BV = torch.where(weights_BV < least_B1, 0.0, weights_BV)
    if top_p_B is not None or top_k_B is not None:
        weights_BV = _truncated(weights_BV, top_p_B, top_k_B)
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = torch.from_numpy(uniforms_B).unsqueeze(1) * cumulative_BV[:, -1:]
    # right=True: the first entry above the target, so a token of weight 0 is never taken
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    if temperature_B is not None:
        tokens_B1 = torch.where((temperature_B == 0).unsqueeze(1), logits_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)


def _truncated(weights_BV: Tensor, top_p_B: Tensor | None, top_k_B: Tensor | None) -> Tensor:
    """Weights with 0 for what top-k, then top-p, cut off."""
    sorted_BV, order_BV = weights_BV.sort(-1, descending=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_k_B is not None:
        limit_B = torch.where(top_k_B == 0, weights_BV.shape[-1], top_k_B)
        keep_BV &= torch.arange(weights_BV.shape[-1]) < limit_B.unsqueeze(1)
    if top_p_B is not None:
        kept_BV = sorted_BV * keep_BV
        mass_before_BV = kept_BV.cumsum(-1) - kept_BV
        keep_BV &= mass_before_BV < top_p_B.unsqueeze(1) * kept_BV.sum(-1, keepdim=True)
    return torch.zeros_like(weights_BV).scatter_(1, order_BV, sorted_BV * keep_BV)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
