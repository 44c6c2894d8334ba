"""The oldest weights behind KV that is shared under a salt."""

from __future__ import annotations

from collections import OrderedDict

from slipstream.common.version import UNSET, PolicyVersion


class SaltVersions:
    """The version each salt was first used at. vLLM does not say whose KV a prefix hit was, so this is the bound."""

    def __init__(self, kept_count: int) -> None:
        self._kept_count = kept_count
        self._first: OrderedDict[str, PolicyVersion] = OrderedDict()
        self._blocks: dict[str, int] = {}
        self._ended: set[str] = set()
        self.dead_blocks = 0
        """Blocks ever filled under salts that ended: a bound, as vLLM does not say which of them it has evicted."""

    def use(self, salt: str, version: PolicyVersion) -> None:
        """A prompt comes in under a salt."""
        self._first.setdefault(salt, version)
        self._first.move_to_end(salt)
        if len(self._first) > self._kept_count:
            forgotten, _ = self._first.popitem(last=False)
            self._blocks.pop(forgotten, None)
            self._ended.discard(forgotten)

    def oldest(self, salt: str) -> PolicyVersion:
        """Of any KV under the salt."""
        return self._first.get(salt, UNSET)

    def filled(self, salt: str, block_count: int) -> None:
        """More blocks hold KV under a salt."""
        self._blocks[salt] = self._blocks.get(salt, 0) + block_count
        if salt in self._ended:
            self.dead_blocks += block_count

    def end(self, salt: str) -> None:
        """The last group of a salt ended."""
        if salt in self._first and salt not in self._ended:
            self._ended.add(salt)
            self.dead_blocks += self._blocks.get(salt, 0)
