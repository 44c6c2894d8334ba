"""Rotary embedding for weights as Hugging Face stores them, in both layouts, with the scalings of `rope_config.py`.

torchtitan's own has no Llama 3 scaling where the halves of a head turn against each other; where neighbours do, weights
would have to be permuted, which could not be shown as views of the live parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.rope_config import RopeScaling
from slipstream.models.titan import CosSinRoPE, yarn_inv_freq


class Rope(CosSinRoPE):
    """Rotary embedding for positions `[1, T]`, without torchtitan's distributed bookkeeping around a table lookup."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """torchtitan's fields, of which those for scaling are not read."""

        frequencies: RopeScaling | None = None
        """How they are scaled."""

        interleaved: bool = False
        """Whether neighbours turn against each other, as in DeepSeek, or halves of a head, as what comes out has."""

    config: Config

    def _precompute_cache(self) -> Tensor:
        config, scaling = self.config, self.config.frequencies
        if torch.empty(0).is_meta:
            return torch.empty(config.max_seq_len, 2 * config.dim)  # see `on_meta`
        inverse = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        if scaling is not None:
            inverse = _scaled(inverse, config, scaling)
        angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), inverse).repeat(1, 2)
        amplitude = 1.0 if scaling is None else scaling.amplitude
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * amplitude

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate query and key `[B, L, N, H]`; `positions` is `[1, L]`, `[B, L]`, or None for 0 to L-1."""
        table = self.cache[: query.shape[1]].unsqueeze(0) if positions is None else self.cache[positions]
        if self.config.interleaved:  # both alike, so that their products stay what they were
            query, key = (torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) for x in (query, key))
        return self.apply_rotary_emb(query, key, table.unsqueeze(2))


def _scaled(inverse: Tensor, config: Rope.Config, scaling: RopeScaling) -> Tensor:
    """Frequencies for contexts longer than those of pre-training."""
    if scaling.rope_type == "linear":
        return inverse / scaling.factor
    if scaling.rope_type == "yarn":
        return yarn_inv_freq(
            config.dim,
            config.theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
            scaling.truncate,
        )
    # llama3: long waves are slowed by the factor, short ones left, those between blended.
    waves = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1.0 - share) * inverse / scaling.factor + share * inverse
