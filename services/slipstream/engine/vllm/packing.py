"""What a step brings for each request, expert routes and log-probabilities, in one piece on its way between processes.

vLLM's engine process sends each request's part of a step as arrays of their own, four with routes. At 64 samples on a
GPU the process that receives them is what a step waits for, and reading them is a third of its work. Here all short
ones travel as a few strings of bytes, beside the statistics of the step.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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


def unpack(outputs: Any) -> None:
    """Give each request back what `pack` took."""
    from vllm.v1.outputs import LogprobsLists

    stats = outputs.scheduler_stats
    if stats is None or not stats.kv_connector_stats:
        return
    packed = stats.kv_connector_stats.pop(PACKED, None)
    stats.kv_connector_stats = stats.kv_connector_stats or None  # vLLM's metrics take an empty one for a connector's
    if packed is None:
        return
    routes, logprobs = packed
    for index, (rows,) in _apart(routes):
        # A copy, as a view would keep the rows of all until the last of them has ended.
        outputs.outputs[index].routed_experts = rows.copy()
    for index, (token_ids, values, ranks) in _apart(logprobs):
        outputs.outputs[index].new_logprobs = LogprobsLists(token_ids, values, ranks)


def unpack_what_comes(core: Any) -> None:
    """Have a client of vLLM's engine process unpack all outputs, before anything looks at them."""
    receive = core.get_output_async

    async def get_output_async() -> Any:
        outputs = await receive()
        unpack(outputs)
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


def _apart(pack: Pack) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
    """Each output's number, and views of its arrays."""
    counts, *described = pack
    columns = [
        np.frombuffer(data, dtype).reshape(-1, *shape)
        for dtype, shape, data in zip(described[::3], described[1::3], described[2::3], strict=True)
    ]
    at = 0
    for index, count in enumerate(counts):
        if count:
            yield index, [column[at : at + count] for column in columns]
            at += count
