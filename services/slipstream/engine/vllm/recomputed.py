"""Which positions of a preempted request vLLM's scheduler computes once more, after their routes were given out.

vLLM hands the row of a position out once, with the token sampled there, and the rows of a prompt with its first token;
so a row stays that of the first time. What it does not say is how much of a preempted request was still cached when it
went on: told here with the request's last output. As with `scheduler.py`, this is of the version that is pinned.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from slipstream.engine.vllm.rows import RECOMPUTED


@dataclass(frozen=True)
class _Held:
    """The blocks of a request at its preemption."""

    block_ids: np.ndarray
    generations: np.ndarray
    """How often each of them had been given out."""


class RecomputeMixin(Scheduler):
    """Compares a request's blocks before its preemption and after it.

    A block may be found again and yet be another's work: evicted, and computed anew by a sibling with newer weights. So
    each time a block is given out counts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}
        """Of preempted requests that have given rows out, until they go on."""
        self._recomputed: dict[str, int] = {}
        """First position computed once more, by request."""
        pool: Any = self.kv_cache_manager.block_pool
        self._generations = np.zeros(pool.num_gpu_blocks, np.int64)
        give_out = pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            blocks = give_out(count)
            self._generations[[block.block_id for block in blocks]] += 1
            return blocks

        pool.get_new_blocks = get_new_blocks

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if request.num_output_tokens and self.enable_return_routed_experts:
            block_ids = self._blocks_of(request.request_id)
            self._held[request.request_id] = _Held(block_ids, self._generations[block_ids])
        super()._preempt_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        for request_id in self._held.keys() & output.num_scheduled_tokens.keys():
            request: Any = self.requests[request_id]
            found = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            start = min(found, self._kept(request_id, self._held.pop(request_id)))
            if start < request.num_tokens - 1:  # nothing had been computed of the last one
                self._recomputed[request_id] = min(start, self._recomputed.get(request_id, start))
        return output

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        params, others = super()._free_request(request, *args, **kwargs)
        self._held.pop(request.request_id, None)
        start = self._recomputed.pop(request.request_id, None)
        return ({**(params or {}), RECOMPUTED: start} if start is not None else params), others

    def _kept(self, request_id: str, held: _Held) -> int:
        """Positions from the first whose blocks are the same as before, and were not given out meanwhile."""
        block_ids = self._blocks_of(request_id)[: len(held.block_ids)]
        before = held.block_ids[: len(block_ids)]
        same = (block_ids == before) & (self._generations[block_ids] == held.generations[: len(block_ids)])
        return int(np.logical_and.accumulate(same).sum()) * self.routed_experts_mgr.block_size

    def _blocks_of(self, request_id: str) -> np.ndarray:
        group = self.routed_experts_mgr.attn_gid
        return np.asarray(self.kv_cache_manager.get_block_ids(request_id)[group], np.int64)
