"""Ends the wait for a card whose collective waits for a rank that is lost.

    watch = CardWatch(roll)
    with watch.watching():         # raises RankLost, as `Roll.watching` does
        ...

On a CPU a collective raises when its peer is gone. One on a card is a kernel that spins: the thread that asks for its
result waits for ever, and once it is given up the result is whatever lay there. So a thread reads the roll meanwhile,
gives the collectives up when a rank falls silent or one of them took too long, and what was computed since is not
believed: the block ends in `RankLost`. A thread that does not come back even so takes the process with it, which then
has said why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import torch

from slipstream.common.runtime import leave
from slipstream.trainer.parallel import backend
from slipstream.trainer.parallel.roll import RankLost, Roll, collective

log = structlog.get_logger()

LOOK_S = 0.5
GRACE_S = 15.0
"""For the thread that waits for the card, after collectives were given up."""


class CardWatch:
    """Looks after the blocks of one thread."""

    def __init__(
        self,
        roll: Roll,
        failed: Callable[[], bool] = backend.failed,
        abort: Callable[[], None] = backend.abort,
        grace_s: float = GRACE_S,
    ) -> None:
        self._roll, self._failed, self._abort, self._grace_s = roll, failed, abort, grace_s
        self._lost: RankLost | None = None
        self._said = threading.Event()
        self._inside = threading.Event()
        threading.Thread(target=self._look, name="card-watch", daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn what fails inside, because a rank is lost, into `RankLost`."""
        self._check()
        self._inside.set()
        try:
            yield
        except Exception as error:
            lost = self._lost or self._blame(error)
            if lost is None:
                raise
            raise lost from error
        finally:
            self._inside.clear()
        self._check()

    def _blame(self, error: Exception) -> RankLost | None:
        if collective(error):
            return self._roll.missing()
        # What a dead rank had lent this card is gone, and the error may be any.
        may_be = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        return self._roll.dead() if may_be else None

    def _check(self) -> None:
        """Raise `RankLost` where what a collective left is not its result."""
        if self._lost is None and not self._failed():
            return
        self._said.wait(self._grace_s)
        raise self._lost or RankLost([], "failed")

    def _look(self) -> None:
        while self._lost is None:
            time.sleep(LOOK_S)
            if self._failed():
                self._lost = self._roll.missing()
            elif self._inside.is_set():
                self._lost = self._roll.silent()
        self._said.set()
        log.error("rank_lost", ranks=self._lost.ranks, detail=str(self._lost))
        threading.Thread(target=self._abort, name="card-abort", daemon=True).start()
        deadline_s = time.monotonic() + self._grace_s
        while self._inside.is_set() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if self._inside.is_set():
            log.error("card_not_given_up", detail="the process ends, as a collective on its card does not")
            leave(1)
