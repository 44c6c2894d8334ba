"""vLLM's scheduler, with two additions: while it is paused, probes run, and nothing else; and salts can end.

So new weights are tried by a forward pass of their own before any request goes on with them, and what was cached under
a salt that nobody uses any more takes no memory. vLLM calls its scheduler interface not public: what is used of it here
is covered by the tests of the engine, for the version that is pinned.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

import vllm
from vllm.distributed.kv_events import MEDIUM_GPU, NullEventPublisher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc

from slipstream.engine.vllm.cache import NEWS, CacheLedger
from slipstream.engine.vllm.config import PROBE_PLACES
from slipstream.engine.vllm.known_rows import KnownRowsMixin
from slipstream.engine.vllm.offload.names import FIGURES
from slipstream.engine.vllm.packing import pack
from slipstream.engine.vllm.recomputed import RecomputeMixin
from slipstream.engine.vllm.transfers import TransferMixin
from slipstream.engine.vllm.versions import version_of

PROBE_PREFIX = "slipstream-probe/"
"""Requests whose ids begin so run while all others are paused."""
_VERSION = version_of(vllm.__version__)


def _probes(requests: Any) -> list[Any]:
    return [request for request in requests if request.request_id.startswith(PROBE_PREFIX)]


class ProbeMixin(Scheduler):
    """Runs probes in a pause."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # On a GPU, what is paused keeps its place among those that run.
        setattr(self, _VERSION.running_limit, getattr(self, _VERSION.running_limit) - PROBE_PLACES)

    def get_num_unfinished_requests(self) -> int:
        if self._pause_state != PauseState.PAUSED_ALL:
            return super().get_num_unfinished_requests()
        return len(_probes(self.running)) + len(_probes(self.waiting))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._pause_state != PauseState.PAUSED_ALL or not self.get_num_unfinished_requests():
            return super().schedule(*args, **kwargs)
        running, queues = self.running, {name: getattr(self, name) for name in _VERSION.waiting_queues}
        waiting: Any = self.waiting
        probes, queued = _probes(running), _probes(waiting)
        waiting.remove_requests(queued)
        self.running = probes
        for name in queues:
            setattr(self, name, create_request_queue(self.policy))
        for request in queued:
            self.waiting.add_request(request)
        self._pause_state = PauseState.UNPAUSED
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._pause_state = PauseState.PAUSED_ALL
            scheduled, left = self.running, [request for name in queues for request in getattr(self, name)]
            others = [request for request in running if request not in probes]
            self.running = others + scheduled
            for name, queue in queues.items():
                setattr(self, name, queue)
            for request in left:
                waiting.add_request(request)
            if not scheduled and others:  # no block is free: the last to come gives its own up, and computes them again
                self.running.remove(others[-1])
                self._preempt_request(others[-1], time.monotonic())
        return output


class LedgerPublisher(NullEventPublisher):
    """Where vLLM publishes what happens to its blocks."""

    def __init__(self, ledger: CacheLedger) -> None:
        self._ledger = ledger

    def publish(self, events: Any) -> None:
        self._ledger.absorb(events.events)


class CacheMixin(Scheduler):
    """Tells of its prefix cache with the statistics of each step, and forgets salts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report_number = self._reported = 0
        self._ledger = CacheLedger(MEDIUM_GPU)  # vLLM's word for the first tier, on the CPU too
        self.kv_event_publisher = LedgerPublisher(self._ledger)

    def end_salt(self, salt: str) -> None:
        """Evict what is cached under a salt, also what running requests hold: nobody else finds it any more."""
        pool = self.kv_cache_manager.block_pool
        for block_hash, group in self._ledger.end(salt):
            while blocks := pool.get_cached_block(block_hash, [group]):
                pool.evict_blocks({blocks[0].block_id})

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            dead_blocks = sum(map(self._evict_blocks_of, self.running))
            self._ledger.absorb(self.kv_cache_manager.take_events() or ())
            if not self.deferred_frees:  # else a step is under way that may still write to blocks of what was aborted
                self._reported = self.report_number
            news = {"dead_blocks": dead_blocks, "events": self._ledger.take(), "report": self._reported}
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), NEWS: news}
        return stats

    def _evict_blocks_of(self, request: Any) -> int:
        """Blocks that a running request holds under a salt that ended; none of them is to be found."""
        if not self._ledger.ended(request.cache_salt):
            return 0
        block_ids = {block for group in self.kv_cache_manager.get_block_ids(request.request_id) for block in group}
        self.kv_cache_manager.block_pool.evict_blocks(block_ids)
        return len(block_ids)


class RouteMixin(Scheduler):
    """Keeps expert routes by slot, where vLLM does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _VERSION.routes_by_slot:
            return
        config: Any = self.vllm_config
        self.enable_return_routed_experts = config.aux_output_config.enabled
        if self.enable_return_routed_experts:
            self.aux_output_connector = self.routed_experts_mgr = self._new_slots()

    def _new_slots(self) -> Any:
        from slipstream.engine.vllm.slots import RouteSlots
        from slipstream.engine.vllm.step_rows import STEP

        (group,) = self.kv_cache_config.kv_cache_groups
        model = self.vllm_config.model_config
        return RouteSlots(
            self.kv_cache_config.num_blocks,
            group.kv_cache_spec.block_size,
            model.get_total_num_hidden_layers(),
            model.get_num_experts(),
            model.get_num_experts_per_tok(),
            lambda request_id: self.kv_cache_manager.get_block_ids(request_id)[0],
            STEP,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not _VERSION.routes_by_slot and self.enable_return_routed_experts:
            self.routed_experts_mgr.store(model_runner_output.aux_output_connector_output)
        return super().update_from_output(scheduler_output, model_runner_output)


class OffloadMixin(Scheduler):
    """Tells an offloading connector what vLLM does not: where routes are, and when; which salts end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector: Any = self.connector
        self._transferred = getattr(connector, "transferred", lambda request_id: False)
        connector = getattr(connector, "offload", connector)  # beside one that moves KV
        self._offload: Any = connector if hasattr(connector, "bind_routes") else None
        if self._offload is not None and self.enable_return_routed_experts:
            routes = self.routed_experts_mgr
            self._offload.bind_routes(routes.routed_experts_by_slot, routes.block_size)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._offload is not None:
            self._offload.computed(scheduler_output)
        return outputs

    def _mark_unknown(self, request: Any, end: int) -> None:
        if self._offload is None or self._transferred(request.request_id):  # else the routes came with the KV
            super()._mark_unknown(request, end)  # type: ignore[misc]

    def end_salt(self, salt: str) -> None:
        super().end_salt(salt)  # type: ignore[misc]
        if self._offload is not None:
            self._offload.end_salt(salt)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._offload is not None:
            figures = vars(self._offload.figures())
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), FIGURES: dict(figures)}
        return stats


class PackMixin(Scheduler):
    """Sends what a step brings in one piece."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            pack(of_client)
        return outputs


class ProbeScheduler(
    PackMixin, OffloadMixin, KnownRowsMixin, TransferMixin, CacheMixin, RecomputeMixin, RouteMixin, ProbeMixin
):
    """For executors that run one step at a time: the CPU."""


class AsyncProbeScheduler(
    PackMixin,
    OffloadMixin,
    KnownRowsMixin,
    TransferMixin,
    CacheMixin,
    RecomputeMixin,
    RouteMixin,
    ProbeMixin,
    AsyncScheduler,
):
    """For executors that schedule ahead."""


def _report(core: Any, number: int) -> None:
    """Tell how things stand, in a pause too; with this number once all blocks are free that are about to be."""
    scheduler = core.scheduler
    scheduler.report_number = number
    if scheduler.deferred_frees and not core.batch_queue:  # no step is under way, and none may come
        scheduler.processed_step_seq = scheduler.sched_step_seq
        scheduler._drain_deferred_frees()
    core.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=core.scheduler.make_stats())))


def _end_salt(core: Any, salt: str) -> None:
    core.scheduler.end_salt(salt)
    _report(core, core.scheduler.report_number)


def _held(core: Any, request_ids: list[str]) -> list[str]:
    """Those of the requests that have ended, and whose KV is kept for others."""
    requests = core.scheduler.requests
    return [each for each in request_ids if each in requests and requests[each].is_finished()]


EngineCoreProc.slipstream_held = _held  # type: ignore[attr-defined]
EngineCoreProc.slipstream_report = _report  # type: ignore[attr-defined]
EngineCoreProc.slipstream_end_salt = _end_salt  # type: ignore[attr-defined]
