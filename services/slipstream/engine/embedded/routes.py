"""Expert routes kept for the trainer, by request or sample, within a byte bound."""

from __future__ import annotations

import numpy as np

from slipstream.common.errors import RoutesUnknown

ENTRY_BYTES = 384
"""What a key takes beside its rows, which are few."""


class RouteStore:
    """Rows by key; the oldest keys are dropped when the bound is reached, and counted. First write wins."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rows: dict[str, tuple[np.ndarray, int]] = {}
        self.size_bytes = 0
        self.dropped_rows = 0

    def put(self, key: str, rows: np.ndarray, first_position: int) -> None:
        """Keep rows, making room if need be."""
        if key in self._rows:
            return
        self._rows[key] = (rows, first_position)
        self.size_bytes += ENTRY_BYTES + rows.nbytes
        while self.size_bytes > self._limit_bytes:
            oldest, _ = self._rows.pop(next(iter(self._rows)))
            self.size_bytes -= ENTRY_BYTES + oldest.nbytes
            self.dropped_rows += len(oldest)

    def get(self, key: str) -> tuple[memoryview, int]:
        """Rows uint8 `[n, moe_layers, top_k]` and the position of the first."""
        if key not in self._rows:
            raise RoutesUnknown(f"no routes under {key!r}", key=key)
        rows, first_position = self._rows[key]
        return rows.data, first_position

    def release(self, key: str) -> bool:
        """Drop a key's rows; False if there are none."""
        entry = self._rows.pop(key, None)
        if entry is None:
            return False
        self.size_bytes -= ENTRY_BYTES + entry[0].nbytes
        return True
