"""What a step brings for each request, expert routes and log-probabilities, in one piece on its way between processes.

vLLM's engine process sends each request's part of a step as arrays of their own, four with routes. At 64 samples on a
GPU the process that receives them is what a step waits for, and reading them is a third of its work. Here all short
ones travel as a few strings of bytes, beside the statistics of the step.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.engine.vllm.direct import DirectSamples

PACKED = "slipstream-packed"
MOST_ROWS = 255
"""Of one request, to be packed: their number is a byte. Routes of whole prompts go by themselves, without a copy."""

Pack = list[Any]
"""Numbers of rows, one byte for each output; then dtype, shape of a row, and all rows, for each of its arrays."""


def pack(outputs: Any) -> None:
    """Move rows out of vLLM's `EngineCoreOutputs` into its statistics; without statistics they stay."""
    stats = outputs.scheduler_stats
    if stats is None or len(outputs.outputs) < 2:
        return
    routes = [_one(output.routed_experts) for output in outputs.outputs]
    logprobs = [_three(output.new_logprobs) for output in outputs.outputs]
    for output, of_routes, of_logprobs in zip(outputs.outputs, routes, logprobs, strict=True):
        if of_routes:
            output.routed_experts = None
        if of_logprobs:
            output.new_logprobs = None
    packed = [_together(routes), _together(logprobs)]
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), PACKED: packed}


def unpack(outputs: Any, direct: DirectSamples | None = None) -> None:
    """Give each request back what `pack` took; what `direct` takes is no longer among the outputs."""
    _unpack(outputs, direct)
    if direct is not None:
        direct.give_way(outputs.outputs)


def _unpack(outputs: Any, direct: DirectSamples | None) -> None:
    from vllm.v1.outputs import LogprobsLists

    stats = outputs.scheduler_stats
    if stats is None or not stats.kv_connector_stats:
        return
    packed = stats.kv_connector_stats.pop(PACKED, None)
    stats.kv_connector_stats = stats.kv_connector_stats or None  # vLLM's metrics take an empty one for a connector's
    if packed is None:
        return
    (row_counts, of_routes), (counts, of_logprobs) = map(_columns, packed)
    values = of_logprobs[1].ravel().tolist() if of_logprobs else []
    each, kind = _each_row(*of_routes)
    left: list[Any] = []
    at = first = 0
    for output, row_count, count in zip(outputs.outputs, row_counts, counts, strict=True):
        known, told = slice(at, at + row_count), slice(first, first + count)
        at, first = known.stop, told.stop
        whole = 0 < count == len(output.new_token_ids) and row_count in (0, count)
        if direct is not None and whole and direct.take(output, values[told], each[known], kind):
            continue
        if row_count:
            # A copy, as a view would keep the rows of all until the last of them has ended.
            output.routed_experts = of_routes[0][known].copy()
        if count:
            token_ids, of_tokens, ranks = (column[told] for column in of_logprobs)
            output.new_logprobs = LogprobsLists(token_ids, of_tokens, ranks)
        left.append(output)
    outputs.outputs = left


def unpack_what_comes(core: Any, direct: DirectSamples) -> None:
    """Have a client of vLLM's engine process unpack all outputs, before anything else looks at them."""
    receive = core.get_output_async

    async def get_output_async() -> Any:
        outputs = await receive()
        unpack(outputs, direct)
        return outputs

    core.get_output_async = get_output_async


def _one(rows: np.ndarray | None) -> Sequence[np.ndarray]:
    return (rows,) if rows is not None and 0 < len(rows) <= MOST_ROWS else ()


def _three(lists: Any) -> Sequence[np.ndarray]:
    """Token ids `[tokens, 1]`, log-probabilities `[tokens, 1]` and ranks `[tokens]`, of sampled tokens alone."""
    if lists is None or lists.cu_num_generated_tokens is not None or lists.logprobs.shape[1:] != (1,):
        return ()
    return lists[:3] if 0 < len(lists.logprobs) <= MOST_ROWS else ()


def _together(parts: Sequence[Sequence[np.ndarray]]) -> Pack:
    """Of each output its arrays, alike in length; none of those that stay where they are."""
    pack: Pack = [bytes(len(arrays[0]) if arrays else 0 for arrays in parts)]
    for column in zip(*(arrays for arrays in parts if arrays), strict=True):
        rows = np.concatenate(column)
        pack += [rows.dtype.str, list(rows.shape[1:]), rows.tobytes()]
    return pack


def _columns(pack: Pack) -> tuple[bytes, list[np.ndarray]]:
    """How many rows each output has, and all rows of each of its arrays."""
    counts, *described = pack
    return counts, [
        np.frombuffer(data, dtype).reshape(-1, *shape)
        for dtype, shape, data in zip(described[::3], described[1::3], described[2::3], strict=True)
    ]


def _each_row(rows: np.ndarray | None = None) -> tuple[list[bytes], tuple[str, Sequence[int]]]:
    """Each row by itself, in one go for all of them; dtype and shape of one."""
    if rows is None:
        return [], ("", ())
    return rows.reshape(len(rows), -1).view(f"V{rows[0].nbytes}").ravel().tolist(), (rows.dtype.str, rows.shape[1:])
