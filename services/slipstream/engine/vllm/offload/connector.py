# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
"""vLLM's offloading connector, with the expert routes of a block kept beside its KV, and salts that can end.

vLLM refuses to capture routes beside a connector: it keeps them by slot of its block pool, and a restored block has
the slot's old ones. Here the routes of a block go with it when it is stored, and are put into the slots of the block
that it is restored to, before its request goes on. So a restored position has the routes it was first computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from slipstream.engine.base import OffloadLoad
from slipstream.engine.vllm.offload.names import SALT

_Blocks = list[tuple[int, int]]
"""(block of the engine's pool, chunk of the memory tier)."""


class OffloadConnector(OffloadingConnector):
    """One engine's; the scheduler's side does all of this."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._slots: np.ndarray | None = None
        self._routes = np.empty(0, np.uint8)
        self._computing: dict[int, _Blocks] = {}
        self._loading: dict[int, _Blocks] = {}
        self._queried: dict[str, int] = {}
        self._figures = OffloadLoad()

    @property
    def _tiers(self) -> Any:
        """The manager of `spec.py`."""
        return self.scheduler.manager

    def bind_routes(self, by_slot: np.ndarray, block_size: int) -> None:
        """`by_slot`: vLLM's routes of all slots, `[slots, layers, top_k]`."""
        memory = self._tiers.primary_tier
        self._slots = by_slot.reshape(-1, block_size, *by_slot.shape[1:])
        self._routes = np.zeros((memory.chunk_count, *self._slots.shape[1:]), by_slot.dtype)
        for tier in self._tiers.secondary_tiers:
            tier.bind_routes(self._routes)

    # --- Routes --------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        finished = frozenset(scheduler_output.finished_req_ids or ())
        metadata: Any = super().build_connector_meta(scheduler_output)
        if self._slots is not None:
            computing: _Blocks = []
            for job in metadata.store_jobs.values():
                blocks = list(zip(job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True))
                if job.req_id in finished:  # computed before; its blocks may be somebody else's after this step
                    self._keep(blocks)
                else:
                    computing += blocks
            self._computing[id(scheduler_output)] = computing
            for job_id, job in metadata.load_jobs.items():
                self._loading[job_id] = list(
                    zip(job.dst_spec.block_ids.tolist(), job.src_spec.block_ids.tolist(), strict=True)
                )
        return metadata

    def computed(self, scheduler_output: Any) -> None:
        """A step is over and vLLM has its routes: those of blocks that are being stored can be kept."""
        self._keep(self._computing.pop(id(scheduler_output), []))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        for job_id in getattr(metadata, "completed_jobs", ()):
            for block, chunk in self._loading.pop(job_id, ()):
                assert self._slots is not None
                self._slots[block] = self._routes[chunk]
        super().update_connector_output(connector_output)

    def _keep(self, blocks: _Blocks) -> None:
        for block, chunk in blocks:
            assert self._slots is not None
            self._routes[chunk] = self._slots[block]

    def reset_cache(self) -> bool | None:
        self._loading.clear()
        return super().reset_cache()

    # --- Salts ---------------------------------------------------------------------------------------

    def end_salt(self, salt: str) -> None:
        """Forget what is kept under a salt, and take nothing more."""
        memory = self._tiers.primary_tier
        memory.ended.add(salt)
        memory.sweep()
        for tier in self._tiers.secondary_tiers:
            tier.end_salt(salt)

    # --- Figures -------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if SALT in (request.kv_transfer_params or {}):
            self._queried[request.request_id] = request.num_tokens - num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        queried = self._queried.pop(request.request_id, None)
        if queried is not None:
            self._figures.query_tokens += queried
            self._figures.hit_tokens += num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._queried.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._queried.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    def figures(self) -> OffloadLoad:
        figures, memory = self._figures, self._tiers.primary_tier
        memory.sweep()
        figures.memory_bytes, figures.dead_bytes = memory.used_bytes, memory.dead_bytes
        stores = {tier.tier_type: tier.blocks for tier in self._tiers.secondary_tiers}
        figures.rejected_blocks = sum(store.rejected_files for store in stores.values())
        figures.failed_blocks = sum(store.failed_writes for store in stores.values())
        if (disk := stores.get("disk")) is not None:
            figures.disk_bytes = disk.used_bytes
            figures.disk_read_bytes, figures.disk_written_bytes = disk.read_bytes, disk.written_bytes
        if (store := stores.get("mooncake")) is not None:
            figures.store_read_bytes, figures.store_written_bytes = store.read_bytes, store.written_bytes
        return figures
