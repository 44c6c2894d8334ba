"""Published weights that a trainer's rank keeps for readers: so many versions, and no more.

A copy that is lent is not overwritten until it is given back or the loan is over; once it is overwritten its loans are
void, and who gives one back hears so. Making room for a new version waits for loans no longer than they last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.common.errors import Overloaded, WeightVersionUnknown
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.weights.manifest import WeightSlice
from slipstream.weights.straight.memory import Memory

MAX_LOANS = 256
"""Of one rank, at once."""


@dataclass
class KeptCopy:
    """Memory, and the version that is in it."""

    memory: Memory
    capacity_bytes: int
    version: PolicyVersion = UNSET
    """`UNSET` while it is being filled."""
    slices: tuple[WeightSlice, ...] = ()
    loans: dict[str, float] = field(default_factory=dict[str, float])
    """By name, when each ends."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.slices)


class KeptCopies:
    """The copies of one rank. Thread-safe: they are filled on the torch thread and lent on the loop."""

    def __init__(
        self,
        allocate: Callable[[int], Memory],
        limit: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocate = allocate
        self._limit = limit
        self._lease_s = lease_s
        self._clock = clock
        self._copies: list[KeptCopy] = []
        self._changed = threading.Condition()

    @property
    def versions(self) -> list[PolicyVersion]:
        """Those that can be read, the oldest first."""
        return sorted(copy.version for copy in self._copies if copy.version)

    @property
    def size_bytes(self) -> int:
        """Of the memory of all copies."""
        return sum(copy.capacity_bytes for copy in self._copies)

    def begin(self, version: PolicyVersion, size_bytes: int) -> KeptCopy:
        """Memory for a version, in place of the oldest; nobody reads it until `keep`."""
        with self._changed:
            copy = self._oldest(version)
            if copy is None:
                copy = KeptCopy(self._allocate(size_bytes), size_bytes)
                self._copies.append(copy)
                return copy
            copy.version = UNSET  # no new loans
            while (left_s := max(copy.loans.values(), default=0.0) - self._clock()) > 0:
                self._changed.wait(left_s)
            copy.loans.clear()
            if copy.capacity_bytes < size_bytes:
                self._copies.remove(copy)  # if there is no memory for another, this one is gone all the same
                copy.memory.close()
                copy = KeptCopy(self._allocate(size_bytes), size_bytes)
                self._copies.append(copy)
            return copy

    def keep(self, copy: KeptCopy, version: PolicyVersion, slices: tuple[WeightSlice, ...]) -> None:
        """It is filled, and can be read from now on."""
        with self._changed:
            copy.slices, copy.version = slices, version

    def lend(self, version: PolicyVersion, name: str, ttl_s: float = 0.0) -> KeptCopy:
        """A copy that stays as it is until `give_back`, or so many seconds; 0 takes the longest time there is."""
        with self._changed:
            copy = next((copy for copy in self._copies if copy.version == version), None)
            if copy is None or not version:
                newest = max(self.versions, default=UNSET)
                raise WeightVersionUnknown(f"{version} is not kept here", version=version, newest=newest or "")
            if name not in copy.loans and sum(map(self._loan_count, self._copies)) >= MAX_LOANS:
                raise Overloaded(f"{MAX_LOANS} loans are open", limit=MAX_LOANS)
            copy.loans[name] = self._clock() + min(ttl_s or self._lease_s, self._lease_s)
            return copy

    def give_back(self, name: str) -> None:
        """End a loan. Raises `WeightVersionUnknown` if it is void."""
        with self._changed:
            for copy in self._copies:
                if copy.loans.pop(name, None) is not None:
                    self._changed.notify_all()
                    return
        raise WeightVersionUnknown("no such loan: what was read may have been overwritten", request_id=name)

    def close(self) -> None:
        with self._changed:
            for copy in self._copies:
                copy.memory.close()
            self._copies.clear()

    def _oldest(self, version: PolicyVersion) -> KeptCopy | None:
        """Whose memory a version takes: its own, if it is made again; None for new memory."""
        free = next((copy for copy in self._copies if copy.version in (UNSET, version)), None)
        if free is not None:
            return free
        if len(self._copies) < self._limit:
            return None
        return min(self._copies, key=lambda copy: copy.version)

    def _loan_count(self, copy: KeptCopy) -> int:
        """How many loans of a copy go on; forgets those that are over where they are many."""
        now_s = self._clock()
        lasting = {name: end_s for name, end_s in copy.loans.items() if end_s > now_s}
        if len(copy.loans) >= MAX_LOANS:
            copy.loans = lasting
        return len(lasting)
