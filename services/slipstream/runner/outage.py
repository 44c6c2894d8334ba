"""A peer that is away is told once, and once more when it is back, however often it was asked meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import structlog

log = structlog.get_logger()


class Outage:
    """Whether one peer answers."""

    def __init__(self, peer: str, clock: Callable[[], float]) -> None:
        self._peer = peer
        self._clock = clock
        self._answered_once = False
        self._since_s: float | None = None

    def failed(self, detail: str) -> None:
        """It did not answer. Before its first answer it is merely not up yet: all services start together."""
        if self._since_s is not None:
            return
        self._since_s = self._clock()
        if self._answered_once:
            log.warning("peer_away", peer=self._peer, detail=detail)
        else:
            log.info("waiting_for_peer", peer=self._peer)

    def answered(self) -> None:
        if self._since_s is not None:
            log.info("peer_answers", peer=self._peer, after_s=round(self._clock() - self._since_s, 1))
        self._answered_once, self._since_s = True, None
