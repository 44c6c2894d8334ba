"""Whether an engine moves: its process or thread may stand still while everything around it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

log = structlog.get_logger()

TICK_S = 0.1
ASK_INTERVAL_S = 1.0


class Pulse:
    """Asks an engine for a sign of life once a second, which it gives between two steps.

    Silence is counted in ticks of our own loop, not by the clock: a process that stood still itself must not say so of
    its engine. It does not count while the engine is held on purpose, for an update, which has deadlines of its own.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Any]],
        limit_s: float,
        held: Callable[[], bool],
        on_silent: Callable[[], None],
    ) -> None:
        """`on_silent` is called once for each time that the limit is passed."""
        self._ask = ask
        self.limit_s = limit_s
        self._held = held
        self._on_silent = on_silent
        self._waited_s = 0.0

    @property
    def silent_s(self) -> float:
        """0 while the engine moves; else how long it has not, once that is longer than the limit."""
        return self._waited_s if self._waited_s > self.limit_s else 0.0

    async def run(self) -> None:
        """Feel it for ever."""
        while True:
            await asyncio.sleep(ASK_INTERVAL_S)
            asked = asyncio.ensure_future(self._ask())
            try:
                while not asked.done():
                    await asyncio.wait((asked,), timeout=TICK_S)
                    if not asked.done() and not self._held():
                        self._tick()
                if not asked.cancelled():
                    asked.exception()  # an engine that ended says so by itself
            finally:
                asked.cancel()
            if self.silent_s:
                log.info("engine_moves_again", silent_s=round(self._waited_s, 1))
            self._waited_s = 0.0

    def _tick(self) -> None:
        silent_before = bool(self.silent_s)
        self._waited_s += TICK_S
        if self.silent_s and not silent_before:
            log.error("engine_silent", silent_s=round(self._waited_s, 1))
            self._on_silent()
