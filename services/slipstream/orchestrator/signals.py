"""Waking whoever waits for a change, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes all current waiters at each `notify`; they look again at what they wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next notify; False when the time ran out first."""
        try:
            # Not `wait_for`: on Python 3.11 it can swallow a cancellation.
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds, looking at each notify; False when the time ran out first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            left = deadline - loop.time()
            if left <= 0 or not await self.wait(left):
                return condition()
        return True
