"""The rotary embedding that a `config.json` asks for. Imports no torch.

transformers 5 writes `rope_parameters`, with the base in it; earlier versions wrote `rope_theta` and `rope_scaling`.
Both are read; the earlier form is written, which all versions read.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from slipstream.common.config import BaseConfig

DEFAULT_THETA = 10000.0
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


class RopeScaling(BaseConfig):
    """How frequencies are scaled for contexts longer than those of pre-training."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """`linear` divides all of them; `llama3` and `yarn` only the slow ones."""

    factor: float = Field(gt=0.0)
    """What frequencies are divided by."""

    original_max_position_embeddings: int = Field(default=8192, ge=1)
    """llama3, yarn: the context of pre-training, in tokens."""

    low_freq_factor: float = Field(default=1.0, gt=0.0)
    """llama3: what turns less often within the original context is divided."""

    high_freq_factor: float = Field(default=4.0, gt=0.0)
    """llama3: what turns more often is left as it is."""

    beta_fast: float = Field(default=32.0, gt=0.0)
    """yarn: what turns more often within the original context is left as it is."""

    beta_slow: float = Field(default=1.0, gt=0.0)
    """yarn: what turns less often is divided."""

    mscale: float | None = Field(default=None, ge=0.0)
    """yarn: how attention sharpens with the factor, if `mscale_all_dim` is given too."""

    mscale_all_dim: float | None = Field(default=None, ge=0.0)
    """yarn: the part of that which DeepSeek gives to its softmax, and takes from the embedding."""

    truncate: bool = True
    """yarn: whether the bounds of what is scaled are whole dimensions."""

    @field_validator("beta_fast", "beta_slow", mode="before")
    @classmethod
    def _unset(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[info.field_name or ""].default if value is None else value

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor: must be above low_freq_factor")
        return self

    @property
    def amplitude(self) -> float:
        """yarn: what sine and cosine are multiplied by."""
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return sharpness(self.factor, self.mscale) / sharpness(self.factor, self.mscale_all_dim)
        return sharpness(self.factor, 1.0)

    def to_hf(self) -> dict[str, Any]:
        """`rope_scaling` of a `config.json`."""
        used = ("rope_type", *_REQUIRED[self.rope_type], *_OPTIONAL.get(self.rope_type, ()))
        return {key: value for key, value in self.model_dump().items() if key in used and value is not None}


def sharpness(factor: float, mscale: float) -> float:
    """YaRN's scale of attention."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; raises `ValueError` that names the key of what is not built."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = dict(config.get(key) or {})
    of_parameters = given.pop("rope_theta", None)
    theta = config.get("rope_theta") or of_parameters or DEFAULT_THETA
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor is {partial!r}, and only 1.0 is built")
    earlier = given.pop("type", "default")
    rope_type = given.pop("rope_type", earlier)
    if rope_type == "default":
        return theta, None
    if rope_type not in _REQUIRED:
        raise ValueError(f"{key}.rope_type is {rope_type!r}, and built are 'default', {str([*_REQUIRED])[1:-1]}")
    missing = [name for name in _REQUIRED[rope_type] if name not in given]
    if missing:
        raise ValueError(f"{key} has no {missing[0]!r}, which rope_type {rope_type!r} needs")
    unknown = sorted(given.keys() - {*_REQUIRED[rope_type], *_OPTIONAL.get(rope_type, ())})
    if unknown:
        raise ValueError(f"{key}.{unknown[0]} is not built for rope_type {rope_type!r}")
    return theta, RopeScaling(rope_type=rope_type, **given)
