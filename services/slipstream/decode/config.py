"""Configuration of a decode worker. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from slipstream.common.config import WorkerEndpoint
from slipstream.engine.worker.config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """A worker that samples."""

    prefill_workers: list[WorkerEndpoint] = Field(default_factory=list)
    """The prefill pool. KV is pulled from these addresses, and a handle of any other is refused."""

    kv_timeout_s: float = Field(default=5.0, gt=0)
    """Time to pull one prompt's KV, broken streams included; then the request fails and is placed again."""

    kv_release_interval_s: float = Field(default=0.2, gt=0)
    """How often prefill workers are told which KV was fetched."""
