"""Rotary embedding as Hugging Face stores weights for it (the halves of a head turn against each other).

torchtitan's own has no Llama 3 scaling in this layout; the other layout would need permuted weights, which could not
be shown as views of the live parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.rope_config import RopeScaling
from slipstream.models.titan import CosSinRoPE


class Rope(CosSinRoPE):
    """Rotary embedding for positions `[1, T]`, without torchtitan's distributed bookkeeping around a table lookup."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """torchtitan's fields, and how frequencies are scaled; its own fields for that are not read."""

        frequencies: RopeScaling | None = None

    config: Config

    def _precompute_cache(self) -> Tensor:
        config = self.config
        inverse = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        if config.frequencies is not None:
            inverse = _scaled(inverse, config.frequencies)
        angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), inverse).repeat(1, 2)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate query and key `[B, L, N, H]`; `positions` is `[1, L]`, `[B, L]`, or None for 0 to L-1."""
        table = self.cache[: query.shape[1]].unsqueeze(0) if positions is None else self.cache[positions]
        return self.apply_rotary_emb(query, key, table.unsqueeze(2))


def _scaled(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies for contexts longer than those of pre-training."""
    if scaling.rope_type == "linear":
        return inverse / scaling.factor
    # llama3: long waves are slowed by the factor, short ones left, those between blended.
    waves = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1.0 - share) * inverse / scaling.factor + share * inverse
