"""Groups from outside that wait for a runner: third parties' and those of sessions, in one line.

Whoever waits longest among those that may go goes first, of whichever kind. What may go says the sequencer, in one
place: groups that train pass the gates of the run's own ones, staleness first of all, the others need a version that is
served. Nobody waits behind a group that may not go. How many there are is bounded by what may be open of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol


class Waiting(Protocol):
    """A group that waits."""

    @property
    def kind(self) -> str:
        """For people: "session" or "external"."""
        ...

    @property
    def trains(self) -> bool:
        """Whether it takes a position of the task sequence, and with it an admission slot."""
        ...

    @property
    def rollout_count(self) -> int:
        """Its members."""
        ...


class Line:
    """Who waits, in the order in which they came."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        """`kinds`: those that are shown as 0 where nobody waits."""
        self._kinds = kinds
        self._waiting: dict[int, Waiting] = {}

    def join(self, group: Waiting) -> None:
        """Stand at the end."""
        self._waiting[id(group)] = group

    def leave(self, group: Waiting) -> None:
        """It goes, or was given up; no harm where it does not wait."""
        self._waiting.pop(id(group), None)

    def first(self, may_go: Callable[[Waiting], bool]) -> Waiting | None:
        """Who waits longest of those that may go."""
        return next(filter(may_go, self._waiting.values()), None)

    @property
    def counts(self) -> dict[str, int]:
        """Groups that wait, by kind."""
        found = Counter(group.kind for group in list(self._waiting.values()))
        return {kind: found[kind] for kind in self._kinds}

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())
