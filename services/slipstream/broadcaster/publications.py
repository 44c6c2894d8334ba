"""What follows a seal: followers are told, Redis learns `published`, and old versions are pruned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

import structlog

from slipstream.broadcaster.store import VersionStore
from slipstream.common.errors import StateUnavailable
from slipstream.common.state import PUBLISHED, SERVING
from slipstream.common.version import PolicyVersion

log = structlog.get_logger()

MIRROR_INTERVAL_S = 1.0


class SharedVersions(Protocol):
    """The part of the run's shared state that this needs."""

    async def advance(self, key: str, version: PolicyVersion) -> bool: ...

    async def version(self, key: str) -> PolicyVersion: ...


class Publications:
    """Keeps followers, Redis and the disk in step with the store."""

    def __init__(self, store: VersionStore, state: SharedVersions, keep_count: int, prune_interval_s: float) -> None:
        self._store = store
        self._state = state
        self._keep_count = keep_count
        self._prune_interval_s = prune_interval_s
        self._sealed = asyncio.Event()

    def announce(self) -> None:
        """Wake everyone who waits for a new version."""
        self._sealed.set()
        self._sealed = asyncio.Event()

    async def follow(self, after: PolicyVersion | None) -> AsyncIterator[PolicyVersion]:
        """The newest version above `after`, then each newer one there is when it is asked for."""
        while True:
            sealed, newest = self._sealed, self._store.newest
            if newest is not None and (after is None or newest > after):
                after = newest
                yield newest
            else:
                await sealed.wait()

    async def mirror(self) -> None:
        """Keep `published` in Redis at the newest version: after each seal, and on a clock, since Redis may come back
        empty."""
        while True:
            sealed, newest = self._sealed, self._store.newest
            if newest is not None:
                await self._write_published(newest)
            with suppress(TimeoutError):
                await asyncio.wait_for(sealed.wait(), MIRROR_INTERVAL_S)

    async def prune_for_ever(self) -> None:
        """Prune on a clock. Without Redis nothing is pruned, since what is served is not known."""
        while True:
            await asyncio.sleep(self._prune_interval_s)
            await self.prune()

    async def prune(self) -> list[PolicyVersion]:
        """Drop all but the newest `keep_count`, the served version, and what is being read."""
        try:
            serving = await self._state.version(SERVING)
        except StateUnavailable:
            self._store.unpruned_for = "redis"
            return []
        self._store.unpruned_for = ""
        gone = self._store.prune(self._keep_count, {serving})  # a worker that restarts refits to it
        if gone:
            log.info("versions_pruned", versions=[str(version) for version in gone])
        return gone

    async def _write_published(self, version: PolicyVersion) -> None:
        try:
            await self._state.advance(PUBLISHED, version)
        except StateUnavailable as error:
            log.warning("published_not_mirrored", policy_version=str(version), detail=error.message)
