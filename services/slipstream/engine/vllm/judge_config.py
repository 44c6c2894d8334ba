"""How a frozen model computes on vLLM. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.common.config import BaseConfig


class VllmJudgeConfig(BaseConfig):
    """vLLM with a checkpoint's own weights, which never change: it is asked what it makes of given tokens."""

    type: Literal["vllm"] = "vllm"
    """Which engine this is."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights, activations and KV."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks that share each matrix: a card each, or on the CPU a process each."""

    expert_parallel: bool = False
    """Whole experts are spread over the ranks, instead of a part of each on every rank."""

    gpu_memory_fraction: float = Field(default=0.9, gt=0, lt=1)
    """Part of each GPU's memory that must be free at the start, and that weights, KV and logits stay within."""

    max_prefill_tokens: int = Field(default=2048, ge=32)
    """Tokens computed in one step; a longer sequence goes in chunks. Their logits are held at once."""

    max_running_sequences: int = Field(default=64, ge=1)
    """Sequences computed side by side."""

    pass_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time for the sequences that go in together: then those are aborted, and tried again one by one."""

    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time for vLLM to come up, its checkpoint read; then its processes say where they stand and are killed."""
