"""Block pool: reference counts, free list and prefix cache of one engine. Knows nothing of tensors.

A block is *held* (reference count above 0), *cached* (count 0, but its hash is known, so that a later prompt may hit
it) or *free*. Cached blocks are given up in least-recently-used order when the free list is empty; that bounds the
cache by the pool. Only full blocks that were registered under a hash are cached.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import KvEvent

EVENT_LIMIT = 65536


class BlockPool:
    """Blocks 0 to `block_count - 1`. Used by the engine's thread alone, but for `drain_events`."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self.references = [0] * block_count
        self.oldest: list[PolicyVersion] = [UNSET] * block_count
        """Oldest weights behind a block's KV; set by whoever fills the block."""
        self._free = list(range(block_count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks of count 0 with a hash, oldest use first
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._salt_of: dict[int, str] = {}
        self._blocks_of: dict[str, set[int]] = {}
        """Findable blocks by the salt of their hash."""
        self._dead: set[int] = set()
        """Held blocks of salts that ended: no later prompt finds them, and they are free when nobody holds them."""
        self._events: deque[KvEvent] = deque()
        self._events_lost = False

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def dead_count(self) -> int:
        """Blocks still held under salts that ended."""
        return len(self._dead)

    @property
    def used(self) -> int:
        """Blocks held by someone."""
        return self.block_count - self.available

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; cached ones lose their content. The caller checked the room."""
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._emit(KvEvent("removed", (self._unregister(block),)))
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of the longest known prefix; takes no reference."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, blocks: Iterable[int]) -> None:
        """Have nobody find these blocks any more. Whoever holds them goes on."""
        for block in blocks:
            self._emit(KvEvent("removed", (self._unregister(block),)))
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def available_beside(self, blocks: Iterable[int]) -> int:
        """Blocks that could be allocated if `blocks` were held."""
        return self.available - sum(self.references[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take a reference to each block."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give a reference back; blocks that nobody holds stay cached if they have a hash."""
        for block in blocks:
            count = self.references[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} released more often than held")
            self.references[block] = count
            if count == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._dead.discard(block)
                    self._free.append(block)

    def register(self, blocks: Sequence[int], hashes: Sequence[int], salt: str) -> None:
        """Make held, filled blocks findable. A hash that is known already keeps its block."""
        stored: list[int] = []
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block in self._dead:  # the salt has ended: what follows would stay, and nobody would find it
                break
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
                self._salt_of[block] = salt
                self._blocks_of.setdefault(salt, set()).add(block)
                stored.append(block_hash)
        if stored:
            self._emit(KvEvent("stored", tuple(stored)))

    def end_salt(self, salt: str) -> None:
        """No prompt of this salt comes any more: what is cached under it is free, what is held is free afterwards."""
        removed: list[int] = []
        for block in sorted(self._blocks_of.get(salt, ())):
            removed.append(self._unregister(block))
            if self.references[block]:
                self._dead.add(block)
            else:
                del self._cached[block]
                self._free.append(block)
        if removed:
            self._emit(KvEvent("removed", tuple(removed)))

    def drain_events(self) -> list[KvEvent]:
        """Events since the last call, in order. Starts with "cleared" if some were lost: then it lists all anew."""
        if self._events_lost:
            self._events_lost = False
            self._events.clear()
            return [KvEvent("cleared"), KvEvent("stored", tuple(self._block_of))]
        events: list[KvEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        held = {block for block, count in enumerate(self.references) if count > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (held & free) | (held & cached) | (free & cached), "a block is in two states"
        assert len(held) + len(free) + len(cached) == self.block_count, "a block was lost"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash tables differ"
        assert cached <= self._hash_of.keys(), "a block is cached without a hash"
        assert not free & self._hash_of.keys(), "a free block has a hash"
        assert {b: s for s, blocks in self._blocks_of.items() for b in blocks} == self._salt_of, "salt tables differ"
        assert self._salt_of.keys() == self._hash_of.keys(), "a findable block has no salt"
        assert held >= self._dead, "a dead block is not held"
        assert not self._dead & self._hash_of.keys(), "a dead block can be found"

    def _unregister(self, block: int) -> int:
        """Make a block unfindable; returns its hash."""
        block_hash, salt = self._hash_of.pop(block), self._salt_of.pop(block)
        del self._block_of[block_hash]
        self._blocks_of[salt].discard(block)
        if not self._blocks_of[salt]:
            del self._blocks_of[salt]
        return block_hash

    def _emit(self, event: KvEvent) -> None:
        if len(self._events) >= EVENT_LIMIT:  # nobody drains: the next drain starts over
            self._events_lost = True
        else:
            self._events.append(event)
