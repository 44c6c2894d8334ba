"""Configuration of the broadcaster."""

from __future__ import annotations

from pydantic import Field

from slipstream.common.config import ServiceConfig


class BroadcasterConfig(ServiceConfig):
    """Where versions are kept, and how many."""

    keep_version_count: int = Field(default=3, ge=1)
    """The newest versions that are never pruned."""

    max_store_bytes: int = Field(default=8 << 30, ge=1)
    """Bytes on disk of all versions; beyond, publishing is refused until older ones are pruned."""

    prune_interval_s: float = Field(default=2.0, gt=0)
    """How often versions that nobody needs any more are looked for."""
