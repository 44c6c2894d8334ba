"""Room for the bodies of all requests that are read, or answered, at once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from slipstream.gateway import telemetry
from slipstream.gateway.refusals import Refusal


class BodyRoom:
    """Counts bytes of bodies. One that finds no room is refused before it is read."""

    def __init__(self, max_body_bytes: int, max_all_bytes: int) -> None:
        self.held_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._max_all_bytes = max_all_bytes
        telemetry.body_bytes.read_from(lambda: self.held_bytes)

    @contextmanager
    def hold(self, announced_bytes: int | None) -> Generator[HeldBody, None, None]:
        """Keep room for a body until it is answered. `announced_bytes`: None where the request does not say.

        Raises `Refusal` where there is none.
        """
        size_bytes = min(self._max_body_bytes if announced_bytes is None else announced_bytes, self._max_body_bytes)
        if self.held_bytes + size_bytes > self._max_all_bytes:
            raise Refusal(
                429,
                f"the bodies of all requests have {self._max_all_bytes} bytes at most (gateway.max_all_bodies_bytes), "
                f"{self.held_bytes} are held: ask again",
                code="bodies_full",
                kind="rate_limit_error",
            )
        held = HeldBody(self, size_bytes)
        self.held_bytes += size_bytes
        try:
            yield held
        finally:
            self.held_bytes -= held.size_bytes


class HeldBody:
    """Room of one body."""

    def __init__(self, room: BodyRoom, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._room = room

    def came(self, size_bytes: int) -> None:
        """It is here, and as large as this."""
        self._room.held_bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes
