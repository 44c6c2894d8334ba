"""Cached blocks whose expert routes nobody here knows, as their KV came from another engine.

The rollout that they came for has its routes from where they were computed, and goes on from them turn after turn.
Another rollout that finds them, by a system prompt that both have, say, has nothing but its own engine: it computes
such blocks once more, and what it computes is found in their place from then on.

As with `scheduler.py`, what is used of vLLM's scheduler is not public, and tested for the version that is pinned.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from slipstream.engine.vllm.rows import ROWS_FROM


def rows_from(request: Any) -> int | None:
    """The first position of a prompt whose routes are wanted of this engine."""
    parameters = request.sampling_params
    return None if parameters is None else (parameters.extra_args or {}).get(ROWS_FROM)


class KnownRowsMixin(Scheduler):
    """Has requests find no cached block that lacks the rows that they want."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unknown: dict[int, Any] = {}
        """Blocks without rows and what they held then: as much as there are blocks."""
        if self.enable_return_routed_experts:
            manager: Any = self.kv_cache_manager
            look_up = manager.get_computed_blocks

            def look_up_known(request: Any) -> Any:
                self._give_up_unknown(request)
                return look_up(request)

            manager.get_computed_blocks = look_up_known

    def _mark_unknown(self, request: Any, end: int) -> None:
        super()._mark_unknown(request, end)  # type: ignore[misc]
        pool, routes = self.kv_cache_manager.block_pool, self.routed_experts_mgr
        start = request.prefill_stats.num_local_cached_tokens if request.prefill_stats is not None else 0
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)[routes.attn_gid]
        for block_id in blocks[start // routes.block_size : end // routes.block_size]:
            self._unknown[block_id] = pool.blocks[block_id].block_hash

    def _give_up_unknown(self, request: Any) -> None:
        """Before a request's prefix is looked up. Whoever uses the blocks goes on with them."""
        first = rows_from(request)
        if first is None or not self._unknown:
            return
        pool, routes = self.kv_cache_manager.block_pool, self.routed_experts_mgr
        for block_hash in request.block_hashes[first // routes.block_size :]:
            while found := pool.get_cached_block(block_hash, [routes.attn_gid]):
                block = found[0]
                if self._unknown.get(block.block_id) != block.block_hash:
                    break
                del self._unknown[block.block_id]
                pool.evict_blocks({block.block_id})
