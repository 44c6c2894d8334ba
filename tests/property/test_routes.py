"""Stitching expert routes by position, against a dictionary of positions."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.errors import RoutesUnknown
from slipstream.engine.routes import ENTRY_BYTES, RouteRows, RouteStore, route_dtype, runs, stitch_routes

SHAPE = (2, 2)
POSITIONS = 24


@st.composite
def segments(draw: st.DrawFn, dtype: str = "uint8") -> RouteRows:
    """Rows somewhere, holes in them; ids up to the largest of the type, which stands for nothing by itself."""
    first = draw(st.integers(0, POSITIONS))
    known = np.array(draw(st.lists(st.booleans(), max_size=POSITIONS - first)), dtype=bool)
    ids = st.integers(0, int(np.iinfo(dtype).max))
    values = draw(st.lists(ids, min_size=len(known), max_size=len(known)))
    rows = np.repeat(np.array(values, dtype), 4).reshape(-1, *SHAPE)
    recomputed_from = draw(st.none() | st.integers(0, POSITIONS))
    return RouteRows(rows, first, runs(~known, first), recomputed_from)


def by_position(routes: RouteRows) -> dict[int, int]:
    known = routes.known()
    return {routes.first_position + i: int(routes.rows[i, 0, 0]) for i in range(len(routes.rows)) if known[i]}


def first_wins(*parts: RouteRows) -> dict[int, int]:
    return {position: row for part in reversed(parts) for position, row in by_position(part).items()}


@settings(deadline=None)
@given(st.lists(segments(), max_size=5), st.integers(0, POSITIONS), st.integers(0, POSITIONS))
def test_each_position_has_the_row_of_the_first_segment_that_knows_it(parts, start, end):
    start, end = sorted((start, end))
    whole = stitch_routes(parts, start, end, SHAPE, np.dtype(np.uint8))
    assert (whole.first_position, whole.end, whole.rows.dtype) == (start, end, np.uint8)
    expected = {position: row for position, row in first_wins(*parts).items() if start <= position < end}
    assert by_position(whole) == expected
    assert (whole.rows[~whole.known()] == 255).all()  # never zeros
    assert all(a < b for a, b in whole.unknown_ranges)
    assert list(whole.unknown_ranges) == sorted(whole.unknown_ranges)
    told = [part.recomputed_from for part in parts if part.recomputed_from is not None]
    assert whole.recomputed_from == min(told, default=None)


@settings(deadline=None)
@given(segments("uint16"))
def test_two_byte_ids_stitch_as_well(part):
    whole = stitch_routes([part], 0, POSITIONS, SHAPE, np.dtype("<u2"))
    assert by_position(whole) == by_position(part)
    assert (whole.rows[~whole.known()] == 65535).all()


@settings(deadline=None)
@given(segments(), st.integers(0, POSITIONS), st.integers(0, POSITIONS))
def test_a_cut_keeps_positions_and_what_is_unknown(part, start, end):
    cut = part.between(start, end)
    assert by_position(cut) == {position: row for position, row in by_position(part).items() if start <= position < end}
    assert np.shares_memory(cut.rows, part.rows) or not len(cut.rows)  # not copied
    assert cut.crc32 == zlib.crc32(cut.rows.tobytes())


@settings(deadline=None)
@given(st.lists(segments(), min_size=1, max_size=5))
def test_a_store_never_replaces_a_row_it_has_and_counts_its_bytes(parts):
    store = RouteStore(1 << 20)
    for part in parts:
        before = by_position(store.get("k")) if store.size_bytes else {}
        store.put("k", part)
        assert by_position(store.get("k")) == {**by_position(part), **before}
    assert store.size_bytes == ENTRY_BYTES + store.get("k").rows.nbytes
    assert store.release("k")
    assert (store.size_bytes, store.release("k")) == (0, False)


def test_a_full_store_drops_the_oldest_and_counts_them():
    rows = np.zeros((10, *SHAPE), np.uint8)
    store = RouteStore(2 * (ENTRY_BYTES + rows.nbytes))
    for key in "abc":
        store.put(key, RouteRows(rows, 0))
    with pytest.raises(RoutesUnknown):
        store.get("a")
    assert store.get("c").end == 10
    assert store.dropped_rows == 10


def test_ids_are_a_byte_up_to_256_experts():
    assert [route_dtype(count).itemsize for count in (1, 256, 257, 65536)] == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="routes are uint8"):
        stitch_routes([RouteRows(np.zeros((1, *SHAPE), np.uint8), 0)], 0, 1, SHAPE, np.dtype("<u2"))
