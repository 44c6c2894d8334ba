"""A board on which ranks leave words for each other, outside of collectives, while one of them is long at something.

    board.put("started", "1")               # rank 0, once it has the model
    board.wait_for("started", stop)         # the others; raises RankLost if a rank falls silent meanwhile

Every call returns at once or looks again and again, so that whoever waits hears of a lost rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from slipstream.trainer.parallel.roll import Roll

LOOK_S = 0.1


class Board:
    """Words by name, in the store that the ranks met in."""

    def __init__(self, store: Store, roll: Roll) -> None:
        self._store = store
        self._roll = roll
        self._lock = threading.Lock()

    def put(self, name: str, word: str) -> None:
        """Leave a word, in place of an older one."""
        with self._roll.naming_the_host(), self._lock:
            self._store.set(name, word)

    def read(self, name: str) -> str | None:
        """The word of this name, if there is one."""
        with self._roll.naming_the_host(), self._lock:
            return self._store.get(name).decode() if self._store.check([name]) else None

    def remove(self, name: str) -> None:
        """Take it down."""
        with self._roll.naming_the_host(), self._lock:
            self._store.delete_key(name)

    def wait_for(self, name: str, stopped: Callable[[], bool]) -> str | None:
        """The word of this name once it is there; None if told to stop before. Raises `RankLost`. Blocks."""
        while not stopped():
            word = self.read(name)
            if word is not None:
                return word
            self._roll.check()
            time.sleep(LOOK_S)
        return None
