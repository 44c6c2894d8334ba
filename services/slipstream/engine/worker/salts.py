"""The salts a worker has seen, and which of them have ended: the end of one frees what is cached under it.

A salt belongs to the version its groups were dispatched at, which every request carries beside it. The version keeper
says, as soon as the last group of a version has ended, which versions groups still run at; the salts of all others have
no more requests to come. One place hands groups out, so that neither routers nor restarts make it wrong. A salt ended
by mistake costs a prefill and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import Engine

MAX_SALTS = 1024


class Salts:
    """Dispatch version by salt, within a bound: past it the salt of the oldest version ends."""

    def __init__(self, engine: Engine, limit: int = MAX_SALTS) -> None:
        self._engine = engine
        self._limit = limit
        self._version_of: dict[str, PolicyVersion] = {}

    def see(self, salt: str, version: PolicyVersion) -> None:
        """A request came under this salt. Without a version nobody would say when it ends, so it is not kept."""
        if not salt or not version or salt in self._version_of:
            return
        self._version_of[salt] = version
        if len(self._version_of) > self._limit:
            self._end(min(self._version_of, key=lambda known: self._version_of[known]))

    def keep(self, running: Collection[PolicyVersion], dispatched_at: PolicyVersion) -> int:
        """End the salts of all versions but these and those from `dispatched_at` on; returns how many ended."""
        ended = [s for s, version in self._version_of.items() if version not in running and version < dispatched_at]
        for salt in ended:
            self._end(salt)
        return len(ended)

    def _end(self, salt: str) -> None:
        del self._version_of[salt]
        self._engine.end_salt(salt)
