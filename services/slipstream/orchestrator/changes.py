"""What changed last, in the order of its changes, for those who follow it, however many and however far behind."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Generic, TypeVar

ThingT = TypeVar("ThingT")

_SPARE = 64
"""Places of earlier changes that are kept at least, so that they are not cleared at each change."""


class Changes(Generic[ThingT]):
    """Things by the number of their last change; numbers only grow."""

    def __init__(self) -> None:
        self._places: list[tuple[int, ThingT | None]] = []
        """By number. None: it has changed again, or is forgotten."""
        self._count = 0

    def add(self, number: int, thing: ThingT) -> None:
        """A thing changed, for the `number`-th time of all."""
        self._places.append((number, thing))
        self._count += 1
        if len(self._places) > 2 * self._count + _SPARE:
            self._places = [place for place in self._places if place[1] is not None]

    def drop(self, number: int) -> None:
        """Forget a change, if it is known."""
        index = bisect_left(self._places, number, key=itemgetter(0))
        if index < len(self._places) and self._places[index][0] == number and self._places[index][1] is not None:
            self._places[index] = (number, None)
            self._count -= 1

    def after(self, number: int, wanted: Callable[[ThingT], bool]) -> tuple[int, ThingT | None]:
        """The first wanted thing whose last change came after `number`, and up to which number there is no other.

        One at a time: while a follower sends one, others change, and what changed would be sent out of order.
        """
        for index in range(bisect_right(self._places, number, key=itemgetter(0)), len(self._places)):
            number, thing = self._places[index]
            if thing is not None and wanted(thing):
                return number, thing
        return number, None
