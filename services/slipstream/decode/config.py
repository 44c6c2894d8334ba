"""Configuration of a decode worker. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from slipstream.engine.worker.config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """A worker that samples."""

    kv_timeout_s: float = Field(default=5.0, gt=0)
    """Time to pull one prompt's KV, broken streams included; then the request fails and is placed again."""

    kv_release_interval_s: float = Field(default=0.2, gt=0)
    """How often prefill workers are told which KV was fetched."""
