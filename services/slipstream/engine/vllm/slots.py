"""Expert routes by slot of the block pool, for versions of vLLM that keep them by content; see `step_rows.py`.

The routes of a position lie where its keys and values lie: a hit in the prefix cache finds both, and what was computed
anew has both anew. Positions whose keys and values came from elsewhere are marked (`transfers.py`), or get theirs
(`offload/connector.py`).
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.engine.routes import route_dtype

STEP_LIMIT = 64
"""Steps under way of which the blocks are remembered; vLLM has two."""


class RouteSlots:
    """`[slots, layers, top_k]`, and what vLLM's scheduler asks of its `AuxOutputSchedulerConnector`."""

    attn_gid = 0
    """Of the one group of blocks."""

    def __init__(
        self,
        block_count: int,
        block_size: int,
        layers: int,
        experts: int,
        top_k: int,
        blocks_of: Callable[[str], Sequence[int]],
        step_key: str,
    ) -> None:
        self.block_size = block_size
        self.routed_experts_by_slot = np.zeros((block_count * block_size, layers, top_k), route_dtype(experts))
        self._blocks_of = blocks_of
        self._step_key = step_key
        self._number = 0
        self._blocks: dict[int, dict[str, Sequence[int]]] = {}
        """Of the requests of each step under way: when it is over they may be others'."""
        self._step: dict[str, tuple[Sequence[int], np.ndarray]] = {}
        """Of the last step that is over: blocks of its requests, and the row of the last position."""

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> int | None:
        """Goes to the worker with a step."""
        if not scheduler_output.num_scheduled_tokens:
            return None
        self._number += 1
        self._blocks[self._number] = {key: self._blocks_of(key) for key in scheduler_output.num_scheduled_tokens}
        self._blocks.pop(self._number - STEP_LIMIT, None)
        return self._number

    def store(self, output: dict[str, Any] | None) -> None:
        """A step is over: keep its rows."""
        self._step = {}
        if output is None:
            return
        step = output[self._step_key]
        blocks_of = self._blocks.pop(step.number)
        slots, start = [], 0
        for key, first, end in zip(step.request_ids, step.first_positions, step.ends, strict=True):
            blocks = blocks_of[key]
            for position in range(first, first + end - start):
                slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
            self._step[key] = (blocks, step.rows[end - 1 : end])
            start = end
        self.routed_experts_by_slot[slots] = step.rows[: len(slots)]

    def take_output(self, request: Any, output: Any) -> np.ndarray | None:
        """Rows that go out with a request's news: with its first token those of the prompt, then one a token."""
        if request.request_id not in self._step or not request.num_output_tokens:
            return None
        blocks, last = self._step[request.request_id]
        if request.num_output_tokens > 1:
            return last
        positions = np.arange(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens)
        slots = np.asarray(blocks)[positions // self.block_size] * self.block_size + positions % self.block_size
        return self.routed_experts_by_slot[slots]

    def request_finished(self, request: Any) -> None:
        """Nothing is kept of requests."""

    def reset(self) -> None:
        """Blocks that are free are written before they are read."""
