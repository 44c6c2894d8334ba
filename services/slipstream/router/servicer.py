"""RouterService: RPC to domain and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from uuid import uuid4

import grpc

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.common.errors import InvalidRequest
from slipstream.common.idempotency import RequestMemory
from slipstream.common.rank_groups import in_whole_groups
from slipstream.common.version import PolicyVersion
from slipstream.router import telemetry
from slipstream.router.leases import Placement, PlacementLeases
from slipstream.router.mirror import LeaseMirror
from slipstream.router.placement import Demand, PlacementPolicy
from slipstream.router.pool import Worker, WorkerPool
from slipstream.router.watch import PoolWatcher

DEFAULT_PAGE_SIZE = 100
WATCH_PERIOD_S = 0.1
WATCH_KEEPALIVE_S = 5.0


class RouterServicer(routing_pb2_grpc.RouterServiceServicer):
    """Serves RouterService over one pool."""

    def __init__(
        self,
        pool: WorkerPool,
        policy: PlacementPolicy,
        leases: PlacementLeases,
        mirror: LeaseMirror,
        watcher: PoolWatcher,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._leases = leases
        self._mirror = mirror
        self._watcher = watcher
        self._memory = RequestMemory()

    async def Place(
        self, request: routing_pb2.PlaceRequest, context: grpc.aio.ServicerContext
    ) -> routing_pb2.PlaceResponse:
        return await self._memory.once(request, lambda: self._place(request))

    async def _place(self, request: routing_pb2.PlaceRequest) -> routing_pb2.PlaceResponse:
        self._mirror.check()
        now_s = time.monotonic()
        version = PolicyVersion.from_proto(request.min_policy_version)
        hashes = request.block_hashes
        demand = Demand(hashes, request.sample_count, version, set(request.avoid_replicas), request.prompt_token_count)
        prefill, decode = self._policy.place(
            self._pool.of_role(worker_pb2.WORKER_ROLE_PREFILL),
            self._pool.of_role(worker_pb2.WORKER_ROLE_DECODE),
            demand,
            now_s,
        )
        placement = Placement(
            placement_id=uuid4().hex,
            group_id=request.group_id,
            prefill=prefill,
            decode=decode,
            prefill_epoch=prefill.epoch if prefill else "",
            decode_epoch=decode.epoch,
            sample_count=request.sample_count,
            expires_at_s=now_s + self._leases.ttl_s,
            runner_id=request.runner_id,
            runner_epoch=request.runner_epoch,
        )
        self._leases.add(placement)
        self._mirror.placed(placement)
        cached = (prefill or decode).cached_tokens(hashes)
        telemetry.placements.inc()
        telemetry.placements_without_prefill.inc(prefill is None)
        telemetry.prompt_tokens.inc(request.prompt_token_count)
        telemetry.expected_cached_tokens.inc(cached)
        return routing_pb2.PlaceResponse(
            placement_id=placement.placement_id,
            prefill=_ref(prefill) if prefill else None,
            decode=_ref(decode),
            lease_ttl_ms=int(self._leases.ttl_s * 1000),
            expected_cached_token_count=cached,
        )

    async def Release(
        self, request: routing_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> routing_pb2.ReleaseResponse:
        released = [placement_id for placement_id in request.placement_ids if self._leases.release(placement_id)]
        self._mirror.released(released)
        if request.runner_id:
            released += self._mirror.runner_started(request.runner_id, request.runner_epoch)
        return routing_pb2.ReleaseResponse(released_count=len(released))

    async def ListWorkers(
        self, request: routing_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> routing_pb2.ListWorkersResponse:
        workers = self._describe()
        size = request.page_size or DEFAULT_PAGE_SIZE
        if request.page_token:
            if self._pool.get(request.page_token) is None:
                raise InvalidRequest("page_token is not one that ListWorkers gave out", field="page_token")
            workers = [worker for worker in workers if worker.ref.replica > request.page_token]
        page = workers[:size]
        more = len(workers) > len(page)
        return routing_pb2.ListWorkersResponse(workers=page, next_page_token=page[-1].ref.replica if more else "")

    async def WatchWorkers(
        self, request: routing_pb2.WatchWorkersRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[routing_pb2.WatchWorkersResponse]:
        while True:
            seen = self._watcher.revision
            yield routing_pb2.WatchWorkersResponse(workers=self._describe())
            await asyncio.sleep(WATCH_PERIOD_S)
            async with self._watcher.changed:
                try:
                    async with asyncio.timeout(WATCH_KEEPALIVE_S):
                        while self._watcher.revision == seen:
                            await self._watcher.changed.wait()
                except TimeoutError:
                    continue

    def _describe(self) -> list[routing_pb2.RoutedWorker]:
        now_s = time.monotonic()
        silence_s = self._policy.silence_s
        routable = {worker.replica for worker in in_whole_groups(self._pool, lambda w: w.routable(now_s, silence_s))}
        return [
            routing_pb2.RoutedWorker(
                ref=_ref(worker),
                role=worker.role,
                state=worker.state,
                version=worker.version.to_proto(),
                load=worker.load,
                routable=worker.replica in routable,
                placement_count=worker.placement_count,
                report_age_ms=-1 if worker.reported_at_s < 0 else int((now_s - worker.reported_at_s) * 1000),
                group=worker.group.to_proto() if worker.group is not None else None,
            )
            for worker in sorted(self._pool, key=lambda worker: worker.replica)
        ]


def _ref(worker: Worker) -> routing_pb2.WorkerRef:
    return routing_pb2.WorkerRef(replica=worker.replica, address=worker.address, epoch=worker.epoch)
