"""Checkpoints that somebody asks for, and how several ranks come to write them at the same step.

Rank 0 hears of them. It says so on the board and goes to the collective at which ranks agree what comes next; the
others, which may be waiting for a plan, look at the board and join it. The least `Move` of all is what all do, so that
a rank that has its plan already keeps it and writes first.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import TYPE_CHECKING

from slipstream.common.errors import CheckpointFailed
from slipstream.common.version import PolicyVersion

if TYPE_CHECKING:  # imports torch
    from slipstream.trainer.parallel.world import World

SAVE = "save"
"""Number of the newest round of saving, on the board."""


class Move(IntEnum):
    """What a rank is ready for between two steps."""

    END = 0
    SAVE = 1
    TRAIN = 2


class AskedSaves:
    """Who asked, and the rounds in which ranks wrote for it."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[PolicyVersion]] = []
        self._soon = False
        self._failed: PolicyVersion | None = None
        self._rounds = 0
        self._over = False

    async def wait(self) -> PolicyVersion:
        """Ask for one; returns its version when it is durable. Raises `CheckpointFailed`."""
        if self._over:
            raise CheckpointFailed("training has ended: no rank writes checkpoints any more")
        future: asyncio.Future[PolicyVersion] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future

    def soon(self) -> None:
        """Ask for one that nobody waits for."""
        self._soon = True

    def note(self, version: PolicyVersion, *, failed: bool) -> None:
        """One was written, or was not: then the next version is to be tried."""
        self._failed = version if failed else None

    async def pending(self, world: World, version: PolicyVersion) -> bool:
        """Whether all ranks, which stand at `version`, are to write one now."""
        if world.rank == 0:
            asked = self._waiting or self._soon or self._failed not in (None, version)
            if asked and not world.alone:
                await asyncio.to_thread(world.board.put, SAVE, str(self._rounds + 1))
            return bool(asked)
        word = await asyncio.to_thread(world.board.read, SAVE)
        return word is not None and int(word) > self._rounds

    def begin(self) -> list[asyncio.Future[PolicyVersion]]:
        """A round begins, at every rank; returns those who wait for it."""
        self._rounds += 1
        self._soon = False
        waiting, self._waiting = self._waiting, []
        return waiting

    def end(self) -> None:
        """No round comes any more."""
        self._over = True
        for future in self.begin():
            if not future.done():
                future.set_exception(CheckpointFailed("training has ended before a checkpoint was written"))
