"""The rotary embedding that a `config.json` asks for. Imports no torch.

transformers 5 writes `rope_parameters`, with the base in it; earlier versions wrote `rope_theta` and `rope_scaling`.
Both are read; the earlier form is written, which all versions read.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig

DEFAULT_THETA = 10000.0
_OF_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RopeScaling(BaseConfig):
    """How frequencies are scaled for contexts longer than those of pre-training."""

    rope_type: Literal["linear", "llama3"]
    """`linear` divides all of them; `llama3` only the slow ones."""

    factor: float = Field(gt=0.0)
    """What frequencies are divided by."""

    low_freq_factor: float = Field(default=1.0, gt=0.0)
    """llama3: what turns less often within the original context is divided."""

    high_freq_factor: float = Field(default=4.0, gt=0.0)
    """llama3: what turns more often is left as it is."""

    original_max_position_embeddings: int = Field(default=8192, ge=1)
    """llama3: the context of pre-training, in tokens."""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor: must be above low_freq_factor")
        return self

    def to_hf(self) -> dict[str, Any]:
        """`rope_scaling` of a `config.json`."""
        fields = self.model_dump()
        return {key: value for key, value in fields.items() if self.rope_type == "llama3" or key not in _OF_LLAMA3}


def read_rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; raises `ValueError` that names the key of what is not built."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = dict(config.get(key) or {})
    theta = config.get("rope_theta") or given.get("rope_theta") or DEFAULT_THETA
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor is {partial!r}, and only 1.0 is built")
    rope_type = given.pop("rope_type", given.pop("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type not in ("linear", "llama3"):
        raise ValueError(f"{key}.rope_type is {rope_type!r}, and only 'default', 'linear' and 'llama3' are built")
    required = ("factor", *(_OF_LLAMA3 if rope_type == "llama3" else ()))
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{key} has no {missing[0]!r}, which rope_type {rope_type!r} needs")
    return theta, RopeScaling(rope_type=rope_type, **{name: given[name] for name in required})
