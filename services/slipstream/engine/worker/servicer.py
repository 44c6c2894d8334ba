"""WorkerService: RPC to domain and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import grpc

from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import Engine, OffloadLoad
from slipstream.engine.worker.gate import WorkerGate
from slipstream.engine.worker.group import Updater
from slipstream.engine.worker.identity import WorkerIdentity
from slipstream.engine.worker.kv_events import KvEventLog
from slipstream.engine.worker.updates import WorkerState, WorkerUpdates

MAX_REPORTS_PER_SECOND = 10
MAX_SILENCE_S = 1.0
DRAIN_TIMEOUT_S = 60.0

_STATES = {
    WorkerState.STARTING: worker_pb2.WORKER_STATE_STARTING,
    WorkerState.SERVING: worker_pb2.WORKER_STATE_SERVING,
    WorkerState.STALE: worker_pb2.WORKER_STATE_STALE,
}


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService over one engine."""

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        updates: WorkerUpdates,
        updater: Updater,
        gate: WorkerGate,
        kv_events: KvEventLog,
        engine_name: str,
        weight_transports: Sequence[str],
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._updates = updates
        self._updater = updater
        self._gate = gate
        self._kv_events = kv_events
        limits = engine.limits
        self._limits = worker_pb2.WorkerLimits(
            block_size_tokens=limits.block_size_tokens,
            block_count=limits.block_count,
            max_context_tokens=limits.max_context_tokens,
            max_running_samples=limits.max_running_samples,
            max_waiting_requests=limits.max_waiting_requests,
            kv_bytes_per_token=limits.kv_bytes_per_token,
            vocabulary_size=limits.vocab_size,
            moe_layers=limits.moe_layers,
            top_k=limits.top_k,
        )
        self._capabilities = worker_pb2.WorkerCapabilities(
            engine=engine_name,
            captures_routes=engine.capabilities.captures_routes,
            updates_in_flight=engine.capabilities.keeps_kv_over_updates,
            kv_transports=engine.capabilities.kv_transports,
            weight_transports=weight_transports,
        )

    async def GetWorker(
        self, request: worker_pb2.GetWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetWorkerResponse:
        version = self._updates.version
        return worker_pb2.GetWorkerResponse(
            replica=self._identity.replica,
            epoch=self._identity.epoch,
            role=self._identity.role,
            state=self._state(),
            version=version.to_proto() if version else None,
            limits=self._limits,
            capabilities=self._capabilities,
            load=self._load(),
            stale_reason=self._updates.stale_reason or self._silence(),
            group=self._group(),
        )

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        interval_s = 1 / (request.max_per_second or MAX_REPORTS_PER_SECOND)
        last, sent_s, due_s = None, 0.0, time.monotonic()
        report = worker_pb2.WatchLoadResponse(epoch=self._identity.epoch, role=self._identity.role, group=self._group())
        with self._kv_events.follower() as follower:
            while True:
                changed, now_s = self._updates.changed, time.monotonic()
                report.state = self._state()
                version = self._updates.version
                if version:
                    report.version.CopyFrom(version.to_proto())
                report.load.CopyFrom(self._load())
                report.kv_events, report.kv_events_reset = self._kv_events.take(follower)
                current = (report.state, version, report.load.SerializeToString())
                if current != last or report.kv_events or now_s - sent_s >= MAX_SILENCE_S:
                    report.sequence += 1
                    yield report
                    last, sent_s = current, now_s
                # A change of state or version is told at once and makes the next report wait longer.
                due_s = max(due_s, now_s) + interval_s
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), due_s - time.monotonic())

    async def BeginUpdate(
        self, request: worker_pb2.BeginUpdateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.BeginUpdateResponse:
        self._gate.check_epoch(request.worker_epoch)
        fetched = await self._updater.begin(request)
        return worker_pb2.BeginUpdateResponse(worker_epoch=self._identity.epoch, fetched_bytes=fetched)

    async def ApplyUpdate(
        self, request: worker_pb2.ApplyUpdateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ApplyUpdateResponse:
        applied = await self._updater.apply(request)
        return worker_pb2.ApplyUpdateResponse(
            pause_us=round(applied.report.pause_s * 1e6),
            apply_us=round(applied.report.apply_s * 1e6),
            verify_us=round(applied.verify_s * 1e6),
            in_flight_sample_count=applied.report.in_flight_samples,
            verified_slice_count=applied.verified_slice_count,
            probe_max_abs_error=applied.probe_max_abs_error,
        )

    async def FinishUpdate(
        self, request: worker_pb2.FinishUpdateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FinishUpdateResponse:
        await self._updater.finish(request)
        return worker_pb2.FinishUpdateResponse(version=self._updates.version.to_proto(), state=self._state())

    async def AbortUpdate(
        self, request: worker_pb2.AbortUpdateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AbortUpdateResponse:
        await self._updater.abort(request)
        return worker_pb2.AbortUpdateResponse(version=self._updates.version.to_proto())

    async def EndSalts(
        self, request: worker_pb2.EndSaltsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.EndSaltsResponse:
        self._gate.check_epoch(request.worker_epoch)
        running = {PolicyVersion.from_proto(version) for version in request.running_versions}
        ended = self._gate.salts.keep(running, PolicyVersion.from_proto(request.dispatch_version))
        return worker_pb2.EndSaltsResponse(ended_salt_count=ended)

    async def VoteUpdate(
        self, request: worker_pb2.VoteUpdateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.VoteUpdateResponse:
        return await self._updater.vote(request)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        left_s = context.time_remaining()
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S if left_s is None else max(0.0, left_s - 0.5)):
                await self._gate.drain()
        except TimeoutError:
            pass  # the count says so
        return worker_pb2.DrainResponse(remaining_request_count=self._gate.active)

    def _state(self) -> worker_pb2.WorkerState:
        if self._gate.draining:
            return worker_pb2.WORKER_STATE_DRAINING
        if self._updates.state is WorkerState.SERVING and self._engine.silent_s:
            return worker_pb2.WORKER_STATE_SILENT
        return _STATES[self._updates.state]

    def _silence(self) -> str:
        silent_s = self._engine.silent_s
        return f"its engine has not moved for {silent_s:.0f} s" if silent_s else ""

    def _group(self) -> worker_pb2.RankGroup | None:
        group = self._identity.group
        return group.to_proto() if group is not None else None

    def _load(self) -> worker_pb2.Load:
        load = self._engine.load()
        return worker_pb2.Load(
            running_sample_count=load.running_samples,
            waiting_request_count=load.waiting_requests,
            blocks_used=load.blocks_used,
            blocks_total=load.blocks_total,
            prefix_query_token_count=load.prefix_query_tokens,
            prefix_hit_token_count=load.prefix_hit_tokens,
            sampled_token_count=load.decoded_tokens,
            prefilled_token_count=load.prefilled_tokens,
            tokens_in_flight_count=load.tokens_in_flight,
            preemption_count=load.preemptions,
            offload=_offload(load.offload) if load.offload is not None else None,
        )


def _offload(load: OffloadLoad) -> worker_pb2.OffloadLoad:
    return worker_pb2.OffloadLoad(
        query_token_count=load.query_tokens,
        hit_token_count=load.hit_tokens,
        memory_bytes=load.memory_bytes,
        disk_bytes=load.disk_bytes,
        dead_bytes=load.dead_bytes,
        disk_read_bytes=load.disk_read_bytes,
        disk_written_bytes=load.disk_written_bytes,
        rejected_block_count=load.rejected_blocks,
        failed_block_count=load.failed_blocks,
        store_read_bytes=load.store_read_bytes,
        store_written_bytes=load.store_written_bytes,
    )
