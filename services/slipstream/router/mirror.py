"""Placement leases as other routers see them in Redis: written in batches, with the TTL of the lease.

A mirror, never the only copy: what this router placed it holds itself. While Redis is away no new placement
is made, since routers could no longer agree.

Runners that were started again are there too, by the router that each told of it: every other one ends what it has
placed for their dead processes. For the TTL of a lease, as no older lease lasts longer.
"""

from __future__ import annotations

import asyncio
import json

import structlog

from slipstream.common.errors import StateUnavailable
from slipstream.common.state import State
from slipstream.router.leases import Placement, PlacementLeases

log = structlog.get_logger()

WRITE_PERIOD_S = 0.1
PING_PERIOD_S = 1.0
LOOK_PERIOD_S = 1.0
KEY = "placement/"
RUNNER_KEY = "runner_epoch/"


class LeaseMirror:
    """Collects what was placed and released, and writes it. One loop a router."""

    def __init__(self, state: State, leases: PlacementLeases) -> None:
        self._state = state
        self._leases = leases
        self._placed: dict[str, str] = {}
        self._released: list[str] = []
        self._started: dict[str, str] = {}
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

    def end_earlier(self, runner_id: str, runner_epoch: str) -> list[str]:
        """End what earlier processes of a runner hold, and return the ids."""
        ended = self._leases.end_earlier(runner_id, runner_epoch)
        if ended:
            log.info("placements_left_behind", runner_id=runner_id, count=len(ended))
        self.released(ended)
        return ended

    def runner_started(self, runner_id: str, runner_epoch: str) -> list[str]:
        """The same, at every router."""
        self._started[RUNNER_KEY + runner_id] = runner_epoch
        return self.end_earlier(runner_id, runner_epoch)

    async def _look(self) -> None:
        """End what other routers were told of."""
        known = await self._state.get_many([RUNNER_KEY + runner_id for runner_id in self._leases.runners()])
        for key, epoch in known.items():
            self.end_earlier(key.removeprefix(RUNNER_KEY), epoch)

    async def run(self) -> None:
        """Write for good. Waits on its clock and on Redis, each write bounded by the client's socket timeout."""
        loop = asyncio.get_running_loop()
        heard_s = looked_s = float("-inf")
        while True:
            placed, released, started = self._placed, self._released, self._started
            self._placed, self._released, self._started = {}, [], {}
            try:
                if self._away is not None:
                    await self._state.ping()  # a full server takes what is released, and nothing else
                if placed or released or started:
                    await self._state.write_many(placed | started, released, self._leases.ttl_s)
                    heard_s = loop.time()
                elif loop.time() - heard_s > PING_PERIOD_S:
                    await self._state.ping()
                    heard_s = loop.time()
                if loop.time() - looked_s > LOOK_PERIOD_S:
                    await self._look()
                    looked_s = loop.time()
            except StateUnavailable as error:
                if self._away is None:
                    log.warning("redis_away", detail=error.message)
                self._away = error
                # What is held is written again, these would be forgotten.
                self._released, self._started = released + self._released, started | self._started
            else:
                if self._away is not None:
                    log.info("redis_back", placements=len(self._leases.held()))
                    self._away = None
                    # The server may be an empty one: what is held goes there again.
                    self._placed = {KEY + p.placement_id: _describe(p) for p in self._leases.held()} | self._placed
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
