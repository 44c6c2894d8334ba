"""Configuration of teacher workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from slipstream.common.config import BaseConfig, ServiceConfig
from slipstream.engine.vllm.judge_config import VllmJudgeConfig


class OwnEngineConfig(BaseConfig):
    """The models that the trainer has, on one device. How it computes is in the teacher's own section."""

    type: Literal["own"] = "own"
    """Which engine this is."""


def _engine_type(value: Any) -> str:
    named = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "own" if named is None else str(named)


TeacherEngineConfig = Annotated[
    Annotated[OwnEngineConfig, Tag("own")] | Annotated[VllmJudgeConfig, Tag("vllm")], Discriminator(_engine_type)
]


class TeacherConfig(ServiceConfig):
    """Which weights, where they compute, and how much waits."""

    teacher_model: Path = Path("teacher")
    """Model directory of the weights."""

    teacher_architecture: str = "qwen3_moe"
    """What computes them, where their own `config.json` names no architecture that is built in."""

    engine: TeacherEngineConfig = OwnEngineConfig()
    """`type = "own"`, or `type = "vllm"`: any model that vLLM runs, over as many cards as it takes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where they compute. "auto" takes a card if there is one; vLLM runs on what it was built for."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products of our own models; their weights are float32."""

    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch's operators, all within one thread of ours."""

    max_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens that go through the model together; a longer sequence goes alone."""

    max_waiting_tokens: int = Field(default=2**21, ge=1)
    """Tokens of calls that wait or are worked on; a call beyond is refused, unless nothing waits."""

    max_request_tokens: int = Field(default=2**20, ge=2**16)
    """Tokens of one call. Runners ask for 65,536 at a time, or for one rollout that is longer."""

    logits_rows: int = Field(default=4096, ge=1)
    """Positions whose logits are held at once, by our own models."""
