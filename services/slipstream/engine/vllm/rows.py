"""Expert routes as vLLM gives them, with the rows it does not know told apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.engine.routes import RouteRows, runs

ROWS_FROM = "slipstream_rows_from"
"""In a request's extra arguments: the first position whose rows are wanted of this engine. Without it, none of its
prompt's."""
RECOMPUTED = "slipstream_recomputed_from"
"""In the transfer parameters that come with a request's last output, which is where vLLM lets a scheduler add to it."""


def unknown_row(dtype: np.dtype[Any]) -> int:
    """What all of a row holds that nobody recorded. No token is routed to one expert `top_k` times."""
    return int(np.iinfo(dtype).max)


def recomputed_from(output: Any) -> int | None:
    """First position that was computed once more, by the last output of a request; None: none was."""
    if output.outputs[0].finish_reason != "abort":
        return (output.kv_transfer_params or {}).get(RECOMPUTED)
    preempted = output.metrics is not None and output.metrics.num_preemptions > 0
    return 0 if preempted else None  # the output is not the scheduler's: at worst all


def routes_of(rows: Any, first: int, dtype: np.dtype[np.unsignedinteger], moe_layers: int) -> RouteRows:
    """Rows of positions from `first` on, `[n, moe_layers, top_k]`; vLLM's have layers without experts, too, first."""
    rows = np.ascontiguousarray(rows[:, -moe_layers:], dtype=dtype)
    return RouteRows(rows, first, runs((rows == unknown_row(dtype)).all(axis=(1, 2)), first))
