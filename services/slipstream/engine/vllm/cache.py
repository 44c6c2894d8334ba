"""What vLLM's prefix cache holds, told in the hashes that routers know; and salts that ended.

`CacheLedger` sits beside vLLM's scheduler and reads its events. What it learns goes with the statistics of a step, so
it comes in order and with the step's tokens, over no socket of its own; `CacheNews` is the other end. A change while
nothing runs is told with statistics of its own.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slipstream.engine.base import KvEvent
from slipstream.engine.hashing import chain, root

NEWS = "slipstream_cache"
"""Where the news are, among what vLLM lets connectors tell."""
ENDED_LIMIT = 4096
"""Salts remembered as ended, for what still runs under them."""
EVENT_LIMIT = 65536


@dataclass
class _Entry:
    """Blocks with one content: vLLM may have several."""

    digest: bytes
    salt: str
    group: int
    copies: int = 1


class CacheLedger:
    """Blocks by vLLM's own hashes."""

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._entries: dict[Any, _Entry] = {}
        self._of_salt: dict[str, set[Any]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._pending: list[tuple[str, list[int]]] = []

    def absorb(self, events: Iterable[Any]) -> None:
        """Take in vLLM's events; those of other tiers than the blocks a forward pass reads are not ours."""
        for event in events:
            if getattr(event, "medium", self._medium) != self._medium:
                continue
            if hasattr(event, "token_ids"):
                self._store(event)
            elif hasattr(event, "block_hashes"):
                self._remove(event.block_hashes)
            else:
                self._entries.clear()
                self._of_salt.clear()
                self._pending = [("cleared", [])]

    def _store(self, event: Any) -> None:
        stored: list[int] = []
        if event.parent_block_hash is None:
            keys = event.extra_keys[0] if event.extra_keys else None
            salt = str(keys[0]) if keys else ""
            digest = root(salt)
        else:
            parent = self._entries.get(event.parent_block_hash)
            if parent is None:  # of a salt that ended: what still runs under it goes on filling blocks
                return
            salt, digest = parent.salt, parent.digest
        layout = struct.Struct(f"<{event.block_size}i")
        for index, block_hash in enumerate(event.block_hashes):
            digest = chain(digest, layout.pack(*event.token_ids[index * event.block_size :][: event.block_size]))
            if (entry := self._entries.get(block_hash)) is not None:
                entry.copies += 1
                continue
            self._entries[block_hash] = _Entry(digest, salt, event.group_idx or 0)
            self._of_salt.setdefault(salt, set()).add(block_hash)
            stored.append(int.from_bytes(digest, "little"))
        if stored:
            self._pending.append(("stored", stored))

    def _remove(self, block_hashes: Iterable[Any]) -> None:
        removed: list[int] = []
        for block_hash in block_hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                continue
            entry.copies -= 1
            if not entry.copies:
                del self._entries[block_hash]
                self._of_salt[entry.salt].discard(block_hash)
                if not self._of_salt[entry.salt]:
                    del self._of_salt[entry.salt]
                removed.append(int.from_bytes(entry.digest, "little"))
        if removed:
            self._pending.append(("removed", removed))

    def end(self, salt: str) -> list[tuple[Any, int]]:
        """A salt ended; returns vLLM's hash and group of each of its blocks, to be evicted."""
        self._ended[salt] = None
        self._ended.move_to_end(salt)
        if len(self._ended) > ENDED_LIMIT:
            self._ended.popitem(last=False)
        return [(block_hash, self._entries[block_hash].group) for block_hash in self._of_salt.get(salt, ())]

    def ended(self, salt: str | None) -> bool:
        return salt in self._ended

    def take(self) -> list[tuple[str, list[int]]]:
        """What happened since the last call."""
        pending, self._pending = self._pending, []
        return pending


class CacheNews:
    """What the engine's process knows of the cache."""

    def __init__(self) -> None:
        self.dead_blocks = 0
        """Held under salts that ended."""
        self.report_number = 0
        """Of the last report that was asked for."""
        self._held: dict[int, None] = {}
        self._events: list[KvEvent] = []
        self._events_lost = False

    def absorb(self, news: dict[str, Any]) -> None:
        self.dead_blocks, self.report_number = news["dead_blocks"], news["report"]
        for kind, block_hashes in news["events"]:
            if kind == "cleared":
                self._held.clear()
            for block_hash in block_hashes:
                if kind == "stored":
                    self._held[block_hash] = None
                else:
                    self._held.pop(block_hash, None)
            if len(self._events) < EVENT_LIMIT:
                self._events.append(KvEvent(kind, tuple(block_hashes)))
            else:  # nobody drains: the next drain starts over
                self._events_lost = True

    def drain_events(self) -> list[KvEvent]:
        """Events since the last call, in order. Starts with "cleared" if some were lost: then it lists all anew."""
        events, self._events = self._events, []
        if self._events_lost:
            self._events_lost = False
            return [KvEvent("cleared"), KvEvent("stored", tuple(self._held))]
        return events
