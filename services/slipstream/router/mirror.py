"""Placement leases as other routers see them in Redis: written in batches, with the TTL of the lease.

A mirror, never the only copy: what this router placed it holds itself. While Redis is away no new placement
is made, since routers could no longer agree.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import structlog

from slipstream.common.errors import StateUnavailable
from slipstream.common.state import State
from slipstream.router.leases import Placement

log = structlog.get_logger()

WRITE_PERIOD_S = 0.1
PING_PERIOD_S = 1.0
KEY = "placement/"


class LeaseMirror:
    """Collects what was placed and released, and writes it. One loop a router."""

    def __init__(self, state: State, ttl_s: float, held: Callable[[], list[Placement]]) -> None:
        self._state = state
        self._ttl_s = ttl_s
        self._held = held
        self._placed: dict[str, str] = {}
        self._released: list[str] = []
        self._away: StateUnavailable | None = StateUnavailable("Redis was not reached yet")

    def check(self) -> None:
        """Raises `StateUnavailable` while Redis is away."""
        if self._away is not None:
            raise StateUnavailable(self._away.message)

    def placed(self, placement: Placement) -> None:
        self._placed[KEY + placement.placement_id] = _describe(placement)

    def released(self, placement_ids: list[str]) -> None:
        for placement_id in placement_ids:
            # Most placements are shorter than the write period and never reach Redis.
            if self._placed.pop(KEY + placement_id, None) is None:
                self._released.append(KEY + placement_id)

    async def run(self) -> None:
        """Write for good. Waits on its clock and on Redis, each write bounded by the client's socket timeout."""
        loop = asyncio.get_running_loop()
        heard_s = float("-inf")
        while True:
            placed, released = self._placed, self._released
            self._placed, self._released = {}, []
            try:
                if placed or released:
                    await self._state.write_many(placed, released, self._ttl_s)
                    heard_s = loop.time()
                elif self._away is not None or loop.time() - heard_s > PING_PERIOD_S:
                    await self._state.ping()
                    heard_s = loop.time()
            except StateUnavailable as error:
                if self._away is None:
                    log.warning("redis_away", detail=error.message)
                self._away = error
                self._released = released + self._released  # what is held is written again, this would be forgotten
            else:
                if self._away is not None:
                    log.info("redis_back", placements=len(self._held()))
                    self._away = None
                    # The server may be an empty one: what is held goes there again.
                    self._placed = {KEY + p.placement_id: _describe(p) for p in self._held()} | self._placed
            await asyncio.sleep(WRITE_PERIOD_S)


def _describe(placement: Placement) -> str:
    return json.dumps(
        {
            "group_id": placement.group_id,
            "prefill": placement.prefill.replica if placement.prefill else "",
            "prefill_epoch": placement.prefill_epoch,
            "decode": placement.decode.replica,
            "decode_epoch": placement.decode_epoch,
            "sample_count": placement.sample_count,
        },
        separators=(",", ":"),
    )
