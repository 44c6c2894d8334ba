"""Configuration of low-rank adapters. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from slipstream.common.config import BaseConfig
from slipstream.models.targets import GROUPS, checked


class AdapterConfig(BaseConfig):
    """Train a product of two narrow matrices beside each weight, which stays as it is."""

    rank: int = Field(default=16, ge=1)
    """Width of the narrow matrices."""

    alpha: float = Field(default=32.0, gt=0)
    """What an adapter adds is scaled by `alpha / rank`."""

    targets: tuple[str, ...] = GROUPS
    """What gets adapters: "attention", "mlp", "experts", or projections by the last part of their Hugging Face name,
    such as "q_proj". The router never does."""

    @field_validator("targets")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked(value)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraConfig(AdapterConfig):
    """Train a product of two narrow matrices beside each weight, which stays as it is."""

    publish: Literal["adapter", "merged"] = "adapter"
    """"adapter": versions after the first carry the adapter alone, and workers add it to the first one's weights, which
    they keep in memory. "merged": every version carries all weights."""
