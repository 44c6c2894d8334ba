"""The section that chooses how conversations become tokens. Imports no renderer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig

SECTION = "runner.renderer"


class TemplateConfig(BaseConfig):
    """The model's own chat template; tool calls in the form of Hermes and Qwen."""

    type: Literal["template"] = "template"
    """Which way."""


class FamilyConfig(BaseConfig):
    """A model family's form of prompts, reasoning and tool calls, by the library `renderers`."""

    type: Literal["renderers"] = "renderers"
    """Which way."""

    family: str = Field(min_length=1, max_length=64)
    """The library's name of it: "qwen3", "glm-4.5", "kimi-k2", "deepseek-v3", "gpt-oss", ..."""

    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the library takes for that family: `{ enable_thinking = false }`, `{ thinking_retention = "all" }`."""


RendererConfig = Annotated[TemplateConfig | FamilyConfig, Field(discriminator="type")]
