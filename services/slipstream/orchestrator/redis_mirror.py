"""What the orchestrator shows in Redis: versions, runner leases and the dispatch versions of open groups.

A mirror, never the only copy. Changes are collected and written in one go; when Redis is away or full admission
pauses, and when it takes writes again everything is written again, so that an empty server is as good as the old one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import structlog

from slipstream.common.errors import StateUnavailable
from slipstream.common.state import PUBLISHED, SERVING, State
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.run_state import RunState

log = structlog.get_logger()

DISPATCH_VERSIONS = "dispatch_versions"
"""Key of a JSON object: group id to dispatch version of every group that a runner has."""

_PAUSE = "redis"
_LEASE_INTERVAL_S = 1.0
_COALESCE_S = 0.1
_RETRY_S = 0.25


class RedisMirror:
    """Keeps Redis equal to the run's state. One loop; nothing else writes these keys."""

    def __init__(
        self,
        redis: State,
        state: RunState,
        leases: RunnerLeases,
        due: asyncio.Event,
        dispatch_versions: Callable[[], dict[str, str]],
        admission_may_have_opened: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._state = state
        self._leases = leases
        self._due = due
        self._dispatch_versions = dispatch_versions
        self._admission_may_have_opened = admission_may_have_opened
        self._written: dict[str, str] = {}
        self._leases_at = float("-inf")

    async def run(self) -> None:
        """Write changes for ever."""
        while True:
            self._due.clear()
            try:
                await self.write()
            except StateUnavailable as error:
                self._lost(error)
                await asyncio.sleep(_RETRY_S)
                continue
            self._found()
            await asyncio.sleep(_COALESCE_S)
            # Leases are renewed, and a server that went away is noticed, even when nothing changes.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEASE_INTERVAL_S - _COALESCE_S):
                    await self._due.wait()

    async def write(self) -> None:
        """Write what differs from what was written last."""
        for key, version in ((PUBLISHED, self._state.published), (SERVING, self._state.serving)):
            if version and self._written.get(key) != str(version):
                await self._redis.advance(key, version)
                self._written[key] = str(version)
        dispatch = json.dumps(self._dispatch_versions(), separators=(",", ":"))
        if self._written.get(DISPATCH_VERSIONS) != dispatch:
            await self._redis.put(DISPATCH_VERSIONS, dispatch)
            self._written[DISPATCH_VERSIONS] = dispatch
        now = asyncio.get_running_loop().time()
        if now - self._leases_at >= _LEASE_INTERVAL_S:
            # Reads instead of a ping: a client that was idle connects to a new, empty server without a word.
            if await self._redis.get(DISPATCH_VERSIONS) != dispatch:
                raise StateUnavailable("the server has lost what was written")
            for runner in (each for each in self._leases.runners if each.epoch):
                fields = {"groups": str(len(runner.attempts))}
                await self._redis.acquire(f"runner/{runner.runner_id}", runner.epoch, self._leases.ttl_s, fields)
            self._leases_at = now

    def _lost(self, error: StateUnavailable) -> None:
        # The server may come back empty: everything is to be written again.
        self._written.clear()
        self._leases_at = float("-inf")
        self._state.pause(_PAUSE, f"admission waits: {error.message}")

    def _found(self) -> None:
        if _PAUSE in self._state.pauses:
            log.info("state_rebuilt", keys=len(self._written))
            self._state.resume(_PAUSE)
            self._admission_may_have_opened()
