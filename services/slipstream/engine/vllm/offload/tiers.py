# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
"""The tiers behind vLLM's tiering manager, in its scheduler's process: host memory, and stores behind it.

vLLM keeps a block in memory (its own least-recently-used policy), copies it on to each store, and brings it back from
there into memory before the engine takes it. Here is what vLLM lacks: which salt a block belongs to, so that a dead
salt's blocks are forgotten; the routes that belong to a block; and stores that hold and check both.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from slipstream.engine.vllm.offload.files import BlockFiles
from slipstream.engine.vllm.offload.mooncake import MooncakeBlocks
from slipstream.engine.vllm.offload.names import SALT

KEPT_ENDED_SALTS = 4096
DISTRUST_S = 60.0
"""A block that could not be read is not asked for again for this long."""
KEPT_DISTRUSTED = 65536


def salt_of(context: ReqContext) -> str:
    return str((context.kv_transfer_params or {}).get(SALT, ""))


class EndedSalts:
    """Salts without further requests. What a late write brings under one of them is thrown away."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, None] = OrderedDict()

    def add(self, salt: str) -> None:
        self._salts[salt] = None
        self._salts.move_to_end(salt)
        if len(self._salts) > KEPT_ENDED_SALTS:
            self._salts.popitem(last=False)

    def __contains__(self, salt: object) -> bool:
        return salt in self._salts

    def __iter__(self) -> Any:
        return iter(tuple(self._salts))


class MemoryTier(CPUPrimaryTierOffloadingManager):
    """vLLM's memory tier, which also knows the salt of each of its blocks."""

    def __init__(self, ended: EndedSalts, **arguments: Any) -> None:
        self._salts: dict[str, set[OffloadKey]] = {}
        self._salt_of: dict[OffloadKey, str] = {}
        self.ended = ended
        super().__init__(**arguments)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        salt = salt_of(req_context)
        output = super().prepare_store(keys, req_context)
        if output is not None:
            for key in output.evicted_keys:
                self._drop(key)
            for key in output.keys_to_store:
                self._salt_of[key] = salt
                self._salts.setdefault(salt, set()).add(key)
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        super().complete_store(keys, req_context, success)
        if not success:
            for key in keys:
                if self._policy.get(key) is None:
                    self._drop(key)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._salts.clear()
        self._salt_of.clear()

    def sweep(self) -> None:
        """Free the blocks of ended salts that no transfer holds."""
        for salt in [salt for salt in self._salts if salt in self.ended]:
            for key in tuple(self._salts[salt]):
                chunk = self._policy.get(key)
                if chunk is not None and chunk.ref_cnt == 0:
                    self._policy.remove(key)
                    self._free_chunk(chunk)
                    self._num_evictable_cache_chunks -= 1
                    self._drop(key)

    def _drop(self, key: OffloadKey) -> None:
        salt = self._salt_of.pop(key, None)
        if salt is not None:
            self._salts[salt].discard(key)
            if not self._salts[salt]:
                del self._salts[salt]

    @property
    def chunk_count(self) -> int:
        return self._num_chunks

    @property
    def used_bytes(self) -> int:
        return len(self._salt_of) * self._mmap_region._row_stride

    @property
    def dead_bytes(self) -> int:
        dead = sum(len(keys) for salt, keys in self._salts.items() if salt in self.ended)
        return dead * self._mmap_region._row_stride


class StoreTier(SecondaryTierManager):
    """Blocks behind memory, in `blocks`. The scheduler's thread only looks; threads of its own read and write."""

    medium = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, blocks: Any, threads: int
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.blocks = blocks
        self._ended: EndedSalts = offloading_spec.ended
        self._kv_bytes: int = offloading_spec.layout.kv_bytes
        self._chunks: np.ndarray | None = np.asarray(primary_kv_view).view(np.uint8)
        self._routes: np.ndarray | None = None
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._distrusted: OrderedDict[OffloadKey, float] = OrderedDict()
        self._open_jobs = 0
        self._idle = threading.Condition()
        self._threads = ThreadPoolExecutor(threads, f"slipstream-kv-{tier_type}")

    def bind_routes(self, routes: np.ndarray) -> None:
        """Routes of the blocks in memory, `[chunks, ...]`: they go and come back with the KV."""
        self._routes = routes

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        salt = salt_of(req_context)
        failed_s = self._distrusted.get(key)
        if salt in self._ended or (failed_s is not None and time.monotonic() - failed_s < DISTRUST_S):
            return LookupResult.MISS
        return self._find(salt, key, req_context)

    @abstractmethod
    def _find(self, salt: str, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a block is here."""

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._load, job_metadata)

    def _submit(self, work: Any, job: TransferJob) -> None:
        # Jobs are as many as memory has blocks to pin, at most.
        with self._idle:
            self._open_jobs += 1
        self._threads.submit(self._run, work, job, list(job.keys))

    def _run(self, work: Any, job: TransferJob, keys: list[OffloadKey]) -> None:
        done: list[OffloadKey] = []
        started_s = time.monotonic()
        try:
            for key, chunk in zip(keys, job.chunk_ids, strict=True):
                if work(salt_of(job.req_context), key, int(chunk)):
                    done.append(key)
        finally:
            complete = len(done) == len(keys)
            self._finished.put(JobResult(job.job_id, complete, tuple(done), time.monotonic() - started_s))
            with self._idle:
                self._open_jobs -= 1
                self._idle.notify_all()

    def _store(self, salt: str, key: OffloadKey, chunk: int) -> bool:
        if salt in self._ended:
            return True
        written = self.blocks.write(salt, key, self._parts(chunk))
        if salt in self._ended:  # by now: its directory may have gone before the file came
            self.blocks.end(salt)
        return written

    def _load(self, salt: str, key: OffloadKey, chunk: int) -> bool:
        return self.blocks.read(salt, key, self._parts(chunk))

    def _parts(self, chunk: int) -> list[memoryview]:
        assert self._chunks is not None
        parts = [self._chunks[chunk, : self._kv_bytes].data]
        if self._routes is not None:
            parts.append(self._routes[chunk].reshape(-1).view(np.uint8).data)
        return parts

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while not self._finished.empty():
            results.append(self._finished.get_nowait())
        return results

    def distrust(self, keys: Iterable[OffloadKey]) -> None:
        """These could not be read: let them be misses for a while, even if their files cannot be removed."""
        for key in keys:
            self._distrusted[key] = time.monotonic()
            if len(self._distrusted) > KEPT_DISTRUSTED:
                self._distrusted.popitem(last=False)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def end_salt(self, salt: str) -> None:
        """Its blocks are removed by whoever ended it."""

    def drain_jobs(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._open_jobs == 0)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=True)
        self._chunks = None  # memory is given back only without views
        self.blocks.close()


class DiskTier(StoreTier):
    """Blocks on a disk of this host: looking is cheap."""

    def __init__(self, spec: Any, view: memoryview, directory: str, disk_bytes: int, io_threads: int) -> None:
        super().__init__(spec, view, "disk", BlockFiles(Path(directory), disk_bytes, spec.layout.digest), io_threads)

    def _find(self, salt: str, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if self.blocks.has(salt, key) else LookupResult.MISS


class MooncakeTier(StoreTier):
    """Blocks in a Mooncake store: its master is asked on a thread, a request's blocks together."""

    def __init__(self, spec: Any, view: memoryview, master: str, lent_bytes: int, host: str, io_threads: int) -> None:
        super().__init__(
            spec, view, "mooncake", MooncakeBlocks(master, lent_bytes, host, spec.layout.digest), io_threads
        )
        self._lookups = _MooncakeLookups(self.blocks)

    def _find(self, salt: str, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def distrust(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        super().distrust(keys)
        self._lookups.mark_miss(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def end_salt(self, salt: str) -> None:
        self._threads.submit(self.blocks.end, salt)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        super().shutdown()


class _MooncakeLookups(AsyncLookupManager):
    def __init__(self, blocks: MooncakeBlocks) -> None:
        self._blocks = blocks
        super().__init__("mooncake")

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._blocks.find(salt_of(req_context), keys)
