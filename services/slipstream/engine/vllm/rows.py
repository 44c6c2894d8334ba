"""Expert routes as vLLM gives them, with the rows it does not know told apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.engine.routes import RouteRows, runs


def unknown_row(dtype: np.dtype[Any]) -> int:
    """What all of a row holds that nobody recorded. No token is routed to one expert `top_k` times."""
    return int(np.iinfo(dtype).max)


def routes_of(rows: Any, first: int, dtype: np.dtype[np.unsignedinteger]) -> RouteRows:
    """Rows of positions from `first` on, `[n, moe_layers, top_k]`."""
    rows = np.ascontiguousarray(rows, dtype=dtype)
    return RouteRows(rows, first, runs((rows == unknown_row(dtype)).all(axis=(1, 2)), first))
