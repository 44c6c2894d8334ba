"""Sizes of the embedded engine. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig


class EmbeddedConfig(BaseConfig):
    """How much the embedded engine holds and runs at once."""

    type: Literal["embedded"] = "embedded"
    """Which engine this is."""

    block_size_tokens: int = Field(default=8, ge=1)
    """Tokens of one KV block. Only full blocks are shared and cached."""

    block_count: int = Field(default=4096, ge=8)
    """KV blocks in the pool."""

    max_running_samples: int = Field(default=128, ge=1)
    """Samples decoded together."""

    max_waiting_requests: int = Field(default=1024, ge=1)
    """Requests that wait for room; one more is refused."""

    max_prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens computed in one step, so that running samples do not wait longer than that; a longer prompt takes
    several."""

    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch's operators, all within the engine's one thread."""

    quantization: Literal["none", "fp8_per_block"] = "none"
    """"fp8_per_block": compute as an engine does that multiplies in FP8, weights with a scale for each 128 by 128 and
    activations for each 1 by 128, slower than without: to see what that does to training, where there is no card."""

    route_bytes: int = Field(default=64 << 20, ge=0)
    """Expert routes kept for the trainer; the oldest are dropped beyond."""

    transfer_ttl_s: float = Field(default=60.0, gt=0)
    """KV of a prefill that nobody released is freed after this long."""

    silence_s: float = Field(default=10.0, gt=0)
    """Longest time without a sign of life between two steps; then the worker takes no requests, until one comes."""

    @model_validator(mode="before")
    @classmethod
    def _offloads_nothing(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("offload") is not None:
            raise ValueError('the embedded engine offloads no KV: leave [engine.offload] out, or set type = "vllm"')
        return value
