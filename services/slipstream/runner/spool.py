"""Rows of finished rollouts, held until they are released.

The spool has a byte bound. A full spool takes no new group (the acquire loop waits), so rows that the
trainer still needs are never dropped to make room.
"""

from __future__ import annotations

from dataclasses import dataclass

ENTRY_BYTES = 256
"""What a key takes beside its rows: rollouts are short, and their names would otherwise be most of the memory."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows under one key: little-endian elements, position by position from `first_position`."""

    data: bytes
    first_position: int = 0


class Spool:
    """A byte-bounded map from key to rows."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._rows: dict[str, Rows] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        return self.size_bytes >= self.limit_bytes

    def put(self, key: str, rows: Rows) -> None:
        """Hold rows. First write wins: a key that is held keeps its rows."""
        if key not in self._rows:
            self._rows[key] = rows
            self.size_bytes += ENTRY_BYTES + len(rows.data)

    def get(self, key: str) -> Rows | None:
        return self._rows.get(key)

    def release(self, key: str) -> bool:
        """Drop rows; false if the key is not held."""
        rows = self._rows.pop(key, None)
        if rows is None:
            return False
        self.size_bytes -= ENTRY_BYTES + len(rows.data)
        return True
