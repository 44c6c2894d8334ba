"""Cache events of one engine, told to any number of followers, each complete from its first report on."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from slipstream.engine.base import KvEvent

_RECORD = struct.Struct("<BQ")
_KINDS = {"stored": 1, "removed": 2, "cleared": 3}
MAX_PENDING_BYTES = 1 << 20
"""Unread events of one follower; beyond, it is told the whole state instead."""


class KvFollower:
    """What one follower has not read yet."""

    def __init__(self) -> None:
        self.pending = bytearray()
        self.behind = True


class KvEventLog:
    """Keeps the set of cached blocks and hands changes on as packed records."""

    def __init__(self) -> None:
        self._held: dict[int, None] = {}
        self._followers: set[KvFollower] = set()

    @contextmanager
    def follower(self) -> Generator[KvFollower, None, None]:
        follower = KvFollower()
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def absorb(self, events: Iterable[KvEvent]) -> None:
        """Take in what the engine did."""
        packed = bytearray()
        for event in events:
            if event.kind == "cleared":
                self._held.clear()
                packed += _RECORD.pack(_KINDS["cleared"], 0)
            for block_hash in event.block_hashes:
                if event.kind == "stored":
                    self._held[block_hash] = None
                elif event.kind == "removed":
                    self._held.pop(block_hash, None)
                packed += _RECORD.pack(_KINDS[event.kind], block_hash)
        for follower in self._followers if packed else ():
            if not follower.behind:
                follower.pending += packed
                if len(follower.pending) > MAX_PENDING_BYTES:
                    follower.behind = True

    def take(self, follower: KvFollower) -> tuple[bytes, bool]:
        """Events since the last take, and whether they replace all that was known before."""
        if follower.behind:
            follower.behind = False
            follower.pending.clear()
            return b"".join(_RECORD.pack(_KINDS["stored"], block_hash) for block_hash in self._held), True
        events = bytes(follower.pending)
        follower.pending.clear()
        return events, False
