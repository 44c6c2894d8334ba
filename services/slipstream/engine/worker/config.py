"""What both kinds of worker are told. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from slipstream.common.config import ServiceConfig
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.vllm.config import VllmConfig


def _engine_type(value: Any) -> str:
    """The engine that a table, or a configuration already read, is of."""
    named = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "embedded" if named is None else str(named)


EngineConfig = Annotated[
    Annotated[EmbeddedConfig, Tag("embedded")] | Annotated[VllmConfig, Tag("vllm")], Discriminator(_engine_type)
]
"""`type = "embedded"` (the default) or `type = "vllm"`; the rest are that engine's sizes."""


class WorkerConfig(ServiceConfig):
    """One engine behind one endpoint."""

    broadcaster: str = "127.0.0.1:7001"
    """host:port of the broadcaster."""

    engine: EngineConfig = EmbeddedConfig()
    """Which engine, and its sizes."""

    fetch_timeout_s: float = Field(default=60.0, gt=0)
    """Time to fetch one version of the weights."""

    timeline_limit_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Bytes of this worker's files under timeline/; the older half goes when they are reached."""

    model_timeout_s: float = Field(default=120.0, ge=0)
    """Time to wait at start for `<run_dir>/model/config.json`."""

    @property
    def model_dir(self) -> Path:
        """Where the model's `config.json` is."""
        return self.run_dir / "model"
