"""Expert routes by position: what engines record, keep and hand out, and how pieces of it become one. Imports no torch.

A row is the experts of one token, `[moe_layers, top_k]`. Which rows are known is told by `unknown_ranges` alone: no
expert id is free to stand for "unknown" where there are 256 experts in a byte. Ranges are half-open, in positions
counted from the first prompt token. First write wins: a row that was recorded is never replaced by one computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipstream.common.crc import crc32
from slipstream.common.errors import RequestIdReused, RoutesUnknown

ENTRY_BYTES = 384
"""What a key takes beside its rows, which are few."""

Ranges = tuple[tuple[int, int], ...]


def route_dtype(expert_count: int) -> np.dtype[np.unsignedinteger]:
    """Of expert ids, little-endian: a byte for up to 256 experts, else two."""
    return np.dtype(np.uint8) if expert_count <= 256 else np.dtype("<u2")


@dataclass(frozen=True)
class RouteRows:
    """Routes of consecutive positions. Whoever gets one may keep it: rows are never written to again."""

    rows: NDArray[np.unsignedinteger]
    """`[n, moe_layers, top_k]`; a row that is not known holds the largest value of its type."""

    first_position: int

    unknown_ranges: Ranges = ()
    """Positions without a row, ascending."""

    recomputed_from: int | None = None
    """The engine computed positions from here on once more, after their rows had been recorded (the KV had gone): rows
    are those of the first time, and what was computed later rests on others. None: it did not."""

    @property
    def end(self) -> int:
        return self.first_position + len(self.rows)

    @cached_property
    def crc32(self) -> int:
        """Of the rows' bytes, CRC-32 (IEEE)."""
        return crc32(self.rows.data) if self.rows.size else 0

    def known(self) -> NDArray[np.bool_]:
        """Which rows are known, `[n]`."""
        known = np.ones(len(self.rows), dtype=bool)
        for start, end in self.unknown_ranges:
            known[max(0, start - self.first_position) : max(0, end - self.first_position)] = False
        return known

    def between(self, start: int, end: int) -> RouteRows:
        """Those of positions `[start, end)` that are here, not copied."""
        start = min(max(start, self.first_position), self.end)
        end = max(start, min(end, self.end))
        if (start, end) == (self.first_position, self.end):
            return self
        ranges = tuple((max(a, start), min(b, end)) for a, b in self.unknown_ranges if b > start and a < end)
        rows = self.rows[start - self.first_position : end - self.first_position]
        return RouteRows(rows, start, ranges, self.recomputed_from)


def runs(mask: NDArray[np.bool_], first_position: int = 0) -> Ranges:
    """The ranges in which `mask` is set."""
    if not mask.any():
        return ()
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + first_position
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def stitch_routes(
    segments: Iterable[RouteRows],
    start: int,
    end: int,
    row_shape: tuple[int, int],
    dtype: np.dtype[np.unsignedinteger],
) -> RouteRows:
    """Rows of positions `[start, end)` out of segments that may overlap or leave gaps, one copy of each row.

    The first segment that knows a position wins. Raises `ValueError` if a segment is of another shape or type.
    """
    out = np.empty((end - start, *row_shape), dtype)
    missing = np.ones(end - start, dtype=bool)
    recomputed_from: int | None = None
    for segment in segments:
        if segment.rows.shape[1:] != row_shape or segment.rows.dtype != dtype:
            raise ValueError(f"routes are {segment.rows.dtype} {segment.rows.shape[1:]}, not {dtype} {row_shape}")
        if segment.recomputed_from is not None:
            earlier = segment.recomputed_from if recomputed_from is None else recomputed_from
            recomputed_from = min(earlier, segment.recomputed_from)
        first, last = max(start, segment.first_position), min(end, segment.end)
        if first >= last:
            continue
        known = segment.known()[first - segment.first_position : last - segment.first_position]
        for a, b in runs(missing[first - start : last - start] & known, first):
            out[a - start : b - start] = segment.rows[a - segment.first_position : b - segment.first_position]
            missing[a - start : b - start] = False
    unknown = runs(missing, start)
    for a, b in unknown:
        out[a - start : b - start] = np.iinfo(dtype).max
    return RouteRows(out, start, unknown, recomputed_from)


class RouteStore:
    """Rows by key; the oldest keys are dropped when the bound is reached, and counted. First write wins."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rows: dict[str, RouteRows] = {}
        self._prompts: dict[str, int] = {}
        """Hashes of the prompts that rows are of, where a key is that of a prompt."""
        self._reserved: set[str] = set()
        self.size_bytes = 0
        self.dropped_rows = 0

    def check(self, request_id: str, sample_ids: Iterable[str], prompt: Callable[[], int]) -> None:
        """Raise `RequestIdReused` if rows of this request would be mixed with those of another one.

        `prompt` tells the hash of the request's: rows of the same prompt are the same, and a repeat adds to them.
        """
        for key in sample_ids:
            if key in self._reserved or key in self._rows:
                raise RequestIdReused(f"another request has its expert routes under {key!r}", request_id=key)
        if request_id in self._rows and self._prompts.get(request_id) != prompt():
            raise RequestIdReused(f"routes of another prompt are held under {request_id!r}", request_id=request_id)

    def reserve(self, keys: Iterable[str]) -> None:
        """Rows will come under these keys, until `unreserve`."""
        self._reserved.update(keys)

    def unreserve(self, keys: Iterable[str]) -> None:
        self._reserved.difference_update(keys)

    def put_prompt(self, request_id: str, routes: RouteRows, prompt: int) -> None:
        """Keep rows of a prompt, whose hash is told."""
        self.put(request_id, routes)
        if request_id in self._rows:
            self._prompts[request_id] = prompt

    def put(self, key: str, routes: RouteRows) -> None:
        """Keep rows, making room if need be. Under a key that is held, only what it lacked is added."""
        held = self._rows.get(key)
        if held is not None:
            routes = _merged(held, routes)
            if routes is held:
                return
            self.size_bytes -= held.rows.nbytes
        else:
            self.size_bytes += ENTRY_BYTES
        self._rows[key] = routes
        _ = routes.crc32  # while the rows are in the processor's cache
        self.size_bytes += routes.rows.nbytes
        while self.size_bytes > self._limit_bytes:
            oldest = next(iter(self._rows))
            self.dropped_rows += len(self._rows[oldest].rows)
            self.release(oldest)

    def get(self, key: str) -> RouteRows:
        if key not in self._rows:
            raise RoutesUnknown(f"no routes under {key!r}", key=key)
        return self._rows[key]

    def release(self, key: str) -> bool:
        """Drop a key's rows; False if there are none."""
        routes = self._rows.pop(key, None)
        if routes is None:
            return False
        self._prompts.pop(key, None)
        self.size_bytes -= ENTRY_BYTES + routes.rows.nbytes
        return True


def _merged(held: RouteRows, news: RouteRows) -> RouteRows:
    """`held` with what `news` knows beyond it; `held` itself if that is nothing."""
    start, end = min(held.first_position, news.first_position), max(held.end, news.end)
    if (start, end) == (held.first_position, held.end) and not held.unknown_ranges:
        return held
    return stitch_routes((held, news), start, end, held.rows.shape[1:], held.rows.dtype)
