"""A version that several ranks publish, each its own part of it.

    rank 0: open ── say so ── own shard ── wait for the others' ── seal ── say so
    others:          wait ─── own shard ── say so ──────────────── wait

A broadcaster that started again has forgotten what was not sealed: rank 0 opens once more, and all publish once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from slipstream.common.errors import ShardsMissing, VersionNotOpen, VersionSealed
from slipstream.common.version import PolicyVersion
from slipstream.trainer.parallel.layout import Layout
from slipstream.weights.manifest import Box, Probe, describe_boxes
from slipstream.weights.transport import WeightTransport

if TYPE_CHECKING:  # imports torch
    from slipstream.trainer.parallel.board import Board
    from slipstream.weights.straight.lender import KeptShard

log = structlog.get_logger()

PAUSE_S = 0.1
REFUSED = " is not open"
"""Said in place of an attempt of which the broadcaster knows nothing any more."""


class Ranks(Protocol):
    """What a publisher asks of `parallel/world.py`."""

    @property
    def rank(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def board(self) -> Board: ...

    def check(self) -> None:
        """Raise `RankLost` for a rank that gives no sign any more."""
        ...


class RankedPublisher:
    """One rank's side of every version."""

    def __init__(self, transport: WeightTransport, world: Ranks) -> None:
        self.transport = transport
        self._world = world
        self._opened = 0
        """How often a version was opened, over all of them: names an attempt."""

    async def publish(
        self, version: PolicyVersion, boxes: Sequence[Box], probe: Probe, kept: KeptShard | None = None
    ) -> None:
        """Return once the version is sealed. May be repeated. Raises `RankLost`.

        `kept`: in place of the boxes, what readers fetch here.
        """
        slices, buffers = await asyncio.to_thread(describe_boxes, boxes) if kept is None else (kept.slices, [])
        source = "" if kept is None else kept.source

        async def send() -> None:
            await self.transport.publish_shard(version, slices, buffers, self._world.rank, source)

        if self._world.rank == 0:
            await self._lead(version, probe, send)
        else:
            await self._follow(version, send)

    async def _lead(self, version: PolicyVersion, probe: Probe, send: Callable[[], Awaitable[None]]) -> None:
        board, ranks = self._world.board, self._world.layout.rank_count
        while True:
            self._opened += 1
            try:
                await self.transport.open_version(version, ranks)
                await asyncio.to_thread(board.put, "open", f"{version}/{self._opened}")
                await send()
                for rank in range(1, ranks):
                    await self._await_shard(rank, version)
                await self.transport.seal_version(version, probe)
                break
            except VersionSealed:  # before this process was started
                break
            except (VersionNotOpen, ShardsMissing) as error:
                log.info("version_opened_again", version=str(version), reason=error.reason)
        await asyncio.to_thread(board.put, "sealed", str(version))

    async def _await_shard(self, rank: int, version: PolicyVersion) -> None:
        """Return once a rank has published. Raises `VersionNotOpen` where it could not."""
        board, name, attempt = self._world.board, f"shard/{rank}", f"{version}/{self._opened}"
        await self._until(lambda: board.read(name) in (attempt, attempt + REFUSED))
        if await asyncio.to_thread(board.read, name) != attempt:
            raise VersionNotOpen(f"rank {rank} found {version} not open", version=version)

    async def _follow(self, version: PolicyVersion, send: Callable[[], Awaitable[None]]) -> None:
        board, sent = self._world.board, ""

        def news() -> bool:
            return board.read("sealed") == str(version) or self._asked(version) not in ("", sent)

        while True:
            await self._until(news)
            attempt = await asyncio.to_thread(self._asked, version)
            if await asyncio.to_thread(board.read, "sealed") == str(version):
                return
            answer = sent = attempt
            try:
                await send()
            except VersionNotOpen:
                answer += REFUSED
            await asyncio.to_thread(board.put, f"shard/{self._world.rank}", answer)

    def _asked(self, version: PolicyVersion) -> str:
        """The attempt at this version that is open, or nothing."""
        attempt = self._world.board.read("open") or ""
        return attempt if attempt.startswith(f"{version}/") else ""

    async def _until(self, there: Callable[[], bool]) -> None:
        """Look until it is so. Raises `RankLost` for a rank that falls silent meanwhile."""
        while not await asyncio.to_thread(there):
            await asyncio.to_thread(self._world.check)
            await asyncio.sleep(PAUSE_S)
