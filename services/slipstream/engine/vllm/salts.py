"""The oldest weights behind KV that is shared under a salt."""

from __future__ import annotations

from collections import OrderedDict

from slipstream.common.version import UNSET, PolicyVersion


class SaltVersions:
    """The version each salt was first used at. vLLM does not say whose KV a prefix hit was, so this is the bound."""

    def __init__(self, kept_count: int) -> None:
        self._kept_count = kept_count
        self._first: OrderedDict[str, PolicyVersion] = OrderedDict()

    def use(self, salt: str, version: PolicyVersion) -> None:
        """A prompt comes in under a salt, computed with these weights, here or elsewhere."""
        self._first[salt] = min(version, self._first.get(salt, version))
        self._first.move_to_end(salt)
        if len(self._first) > self._kept_count:
            self._first.popitem(last=False)

    def oldest(self, salt: str) -> PolicyVersion:
        """Of any KV under the salt."""
        return self._first.get(salt, UNSET)
