"""Configuration of FP8. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from slipstream.common.config import BaseConfig
from slipstream.models.targets import GROUPS, checked


class Fp8Config(BaseConfig):
    """Multiply in FP8: weights with a scale for each 128 by 128, activations and gradients for each 1 by 128."""

    targets: tuple[str, ...] = GROUPS
    """What is multiplied so: "attention", "mlp", "experts", or projections by the last part of their Hugging Face name.
    Embeddings, head, router, norms and attention itself never are."""

    backend: Literal["auto", "emulated"] = "auto"
    """"auto": on a card torchao's kernels, and DeepGEMM's for experts where it is installed; on a processor the
    emulation. "emulated": round to FP8 and multiply in the dtype of the model, everywhere."""

    @field_validator("targets")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked(value)
