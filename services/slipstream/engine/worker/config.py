"""What both kinds of worker are told. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from slipstream.common.config import ServiceConfig
from slipstream.engine.embedded.config import EmbeddedConfig


class WorkerConfig(ServiceConfig):
    """One engine behind one endpoint."""

    broadcaster: str = "127.0.0.1:7001"
    """host:port of the broadcaster."""

    engine: EmbeddedConfig = EmbeddedConfig()
    """Sizes of the engine."""

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
