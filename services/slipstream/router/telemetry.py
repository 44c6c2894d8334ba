"""Metrics of a router."""

from __future__ import annotations

import time

from prometheus_client import Counter

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.metrics import Reading
from slipstream.common.rank_groups import in_whole_groups
from slipstream.router.leases import PlacementLeases
from slipstream.router.pool import WorkerPool

placements = Counter("slipstream_router_placements", "Turns placed.")
placements_without_prefill = Counter(
    "slipstream_router_placements_without_prefill", "Those whose decode worker computes the prompt itself."
)
prompt_tokens = Counter("slipstream_router_prompt_tokens", "Prompt tokens of turns placed.")
expected_cached_tokens = Counter(
    "slipstream_router_expected_cached_tokens", "Those that the worker which computes the prompt was believed to hold."
)
leases_expired = Counter("slipstream_router_leases_expired", "Placements that nobody released in time.")
leases_open = Reading("gauge", "slipstream_router_leases", "Placements that are held.")
routable_workers = Reading("gauge", "slipstream_router_routable_workers", "Workers that take requests.", ["role"])

_ROLES = {"prefill": worker_pb2.WORKER_ROLE_PREFILL, "decode": worker_pb2.WORKER_ROLE_DECODE}


def observe(pool: WorkerPool, leases: PlacementLeases, silence_s: float) -> None:
    """Read this router from now on."""

    def routable() -> dict[str, float]:
        now_s = time.monotonic()
        return {
            name: len(in_whole_groups(pool.of_role(role), lambda worker: worker.routable(now_s, silence_s)))
            for name, role in _ROLES.items()
        }

    leases_open.read_from(lambda: len(leases))
    routable_workers.read_from(routable)
