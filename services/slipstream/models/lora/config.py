"""Configuration of low-rank adapters. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from slipstream.common.config import BaseConfig

GROUPS = ("attention", "mlp", "experts")
"""Projections of attention, of feed-forward networks, and of the experts that tokens choose."""


class LoraConfig(BaseConfig):
    """Train a product of two narrow matrices beside each weight, which stays as it is."""

    rank: int = Field(default=16, ge=1)
    """Width of the narrow matrices."""

    alpha: float = Field(default=32.0, gt=0)
    """What an adapter adds is scaled by `alpha / rank`."""

    targets: tuple[str, ...] = GROUPS
    """What gets adapters: "attention", "mlp", "experts", or projections by the last part of their Hugging Face name,
    such as "q_proj". The router never does."""

    publish: Literal["adapter", "merged"] = "adapter"
    """"adapter": versions after the first carry the adapter alone, and workers add it to the first one's weights, which
    they keep in memory. "merged": every version carries all weights."""

    @field_validator("targets")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(not name or not name.replace("_", "").isalnum() for name in value):
            raise ValueError('name "attention", "mlp", "experts" or projections such as "q_proj"')
        return value

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
