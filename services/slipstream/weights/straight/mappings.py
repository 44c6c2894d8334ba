"""Memory of other processes that is mapped into this one, for as long as they live.

| thread | does | waits for | ended by |
|---|---|---|---|
| one | unmaps what an ended process had | `LOOK_S` at a time | `close` |

What is mapped stays allocated after its owner is gone: on a card the owner's next incarnation would lack that memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()

LOOK_S = 1.0
MAX_OPEN = 32
"""Allocations of others; opening one takes milliseconds."""


class Mappings:
    """Addresses by process and handle."""

    def __init__(self, map_handle: Callable[[bytes], int], unmap: Callable[[int], None]) -> None:
        """`unmap`: called on any thread, and not while an address is in use."""
        self._map = map_handle
        self._unmap = unmap
        self._open: dict[tuple[int, bytes], int] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None

    @contextmanager
    def address(self, pid: int, handle: bytes) -> Generator[int, None, None]:
        """Where a process's allocation is; it stays there until this is left."""
        with self._lock:
            key = (pid, handle)
            if key not in self._open:
                self._drop_ended()
                while len(self._open) >= MAX_OPEN:
                    self._unmap(self._open.pop(next(iter(self._open))))
                self._open[key] = self._map(handle)
                if self._watch is None:
                    self._watch = threading.Thread(target=self._look, daemon=True)
                    self._watch.start()
            yield self._open[key]

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            while self._open:
                self._unmap(self._open.popitem()[1])

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._lock:
                try:
                    self._drop_ended()
                except Exception as error:  # the driver's: it is no longer ours, whatever it is
                    log.warning("memory_not_unmapped", detail=str(error))

    def _drop_ended(self) -> None:
        for key in [key for key in self._open if not os.path.exists(f"/proc/{key[0]}")]:
            self._unmap(self._open.pop(key))
