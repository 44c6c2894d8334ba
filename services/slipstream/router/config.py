"""Configuration of the router."""

from __future__ import annotations

from pydantic import Field

from slipstream.common.config import ServiceConfig, WorkerEndpoint


class RouterConfig(ServiceConfig):
    """Everything the router reads."""

    prefill_workers: list[WorkerEndpoint] = Field(default_factory=list)
    """The prefill pool."""

    decode_workers: list[WorkerEndpoint] = Field(default_factory=list)
    """The decode pool."""

    remote_prefill_min_uncached_tokens: int = Field(default=0, ge=0)
    """A prompt of which its decode worker lacks fewer tokens than this is computed there, not sent by a prefill worker.
    0: all prompts go through the prefill pool, if there is one."""

    lease_ttl_s: float = Field(default=60.0, gt=0)
    """A placement that is not released ends after this, in seconds."""

    max_placements: int = Field(default=65536, ge=1)
    """Placements held at once; beyond, Place answers POOL_SATURATED."""

    worker_silence_s: float = Field(default=3.0, gt=0, le=5.0)
    """A worker without a load report for this long is not offered, in seconds."""

    saturation_fraction: float = Field(default=0.9, gt=0, le=1)
    """Part of its sample slots or KV blocks above which a worker counts as saturated."""

    affinity_slack_samples: int = Field(default=64, ge=0)
    """Samples by which a worker with a longer cached prefix may be busier than the least busy one."""

    prefix_index_blocks: int = Field(default=262144, ge=1)
    """Block hashes remembered for each worker at most; the oldest are forgotten."""
