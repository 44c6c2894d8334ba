# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
"""How vLLM is to offload: its tiering specification with our tiers, on the CPU with copies of our own.

On a GPU vLLM moves the blocks between GPU and host memory itself. On the CPU it refuses to, so `HostWorker` copies.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from slipstream.engine.vllm.offload.layout import Layout
from slipstream.engine.vllm.offload.tiers import DiskTier, EndedSalts, MemoryTier, MooncakeTier


class HostWorker(OffloadingWorker):
    """Copies blocks between the engine's pool and the memory tier, at once; for KV that is in host memory anyway."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pool = [each.tensor for each in kv_caches.tensors]
        self._tier = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pool, src_spec, self._tier, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._tier, src_spec, self._pool, dst_spec)

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], source: Any, targets: list[torch.Tensor], target: Any
    ) -> bool:
        assert isinstance(source, CPULoadStoreSpec) or isinstance(target, CPULoadStoreSpec)
        started_s, size = time.monotonic(), 0
        rows = torch.as_tensor(source.block_ids, dtype=torch.long)
        places = torch.as_tensor(target.block_ids, dtype=torch.long)
        for one, other in zip(sources, targets, strict=True):
            other[places] = one[rows]
            size += len(rows) * one.shape[1]
        self._done.append(TransferResult(job_id, True, size, time.monotonic() - started_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies are finished when they were submitted."""

    def shutdown(self) -> None:
        self._tier.clear()
        self._region.cleanup()


class TierManager(TieringOffloadingManager):
    """vLLM's manager of tiers, which keeps what failed to load away from the next lookup."""

    def _complete_promotion(self, job_metadata: Any, completed_job: Any) -> None:
        super()._complete_promotion(job_metadata, completed_job)
        if not completed_job.success:
            failed = set(job_metadata.transfer_job.keys) - set(completed_job.successful_keys or ())
            self.secondary_tiers[job_metadata.tier_idx].distrust(failed)


class OffloadSpec(TieringOffloadingSpec):
    """The tiers of one engine. Its options are in `options.py`."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ValueError("a block is offloaded as it is: blocks_per_chunk must be 1")
        self._host_worker: HostWorker | None = None
        self.ended = EndedSalts()
        options = config.extra_config
        parallel = config.parallel
        self.layout = Layout(
            model=options["model_digest"],
            engine=options["engine"],
            dtype=config.model.dtype,
            block_size_tokens=config.groups[0].tokens_per_block,
            kv_bytes=self.cpu_page_size_per_worker * (1 if self.replicated_layout else parallel.world_size),
            tensor_parallel=parallel.tp_size,
            pipeline_parallel=parallel.pp_size,
            context_parallel=parallel.pcp_size * parallel.dcp_size,
            kv_cache_layout=str(config.kv_cache_layout),
            layers=tuple(name for group in config.groups for name in group.layer_names),
            route_bytes=options["route_bytes_per_block"],
            hash_algorithm=options["hash_algorithm"],
        )

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=None,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._scheduler_mmap = region
            memory = MemoryTier(
                self.ended,
                num_chunks=self.num_chunks,
                mmap_region=region,
                cache_policy="lru",
                enable_events=False,  # KV events are of the engine's own pool
            )
            tiers: list[Any] = []
            for name, kind in (("disk", DiskTier), ("mooncake", MooncakeTier)):
                if options := self.extra_config.get(name):
                    tiers.append(kind(self, memory.get_kv_memoryview(), **options))
            self._manager = TierManager(primary_tier=memory, secondary_tiers=tiers)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostWorker(kv_caches, region)
        return self._host_worker
