"""What the router hears of workers, so that nobody waits for one that stands still while another could do the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import structlog

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.common.errors import Unreachable

log = structlog.get_logger()

RECONNECT_S = 0.5
SETTLE_S = 0.3
"""A call goes on at least for so long: the router may have placed it by a report that is not known here yet."""


@dataclass(eq=False)
class _Call:
    worker: routing_pb2.WorkerRef
    limit: asyncio.Timeout
    started_s: float
    """On the loop's clock."""


class WorkerWatch:
    """Follows the router's list of workers. While the router is away, nothing is known to be lost."""

    def __init__(self, router: routing_pb2_grpc.RouterServiceStub) -> None:
        self._router = router
        self._calls: set[_Call] = set()
        self._lost: set[str] = set()
        """Replicas that the router hears nothing of, or whose engine stands still, with another of their pool left."""

    async def follow(self) -> None:
        """Follow the list for good."""
        while True:
            try:
                async for response in self._router.WatchWorkers(routing_pb2.WatchWorkersRequest()):
                    self.heard(response.workers)
            except grpc.aio.AioRpcError as error:
                log.debug("router_unreachable", code=error.code().name)
            self.heard(())
            await asyncio.sleep(RECONNECT_S)

    def heard(self, workers: Iterable[routing_pb2.RoutedWorker]) -> None:
        """Take in a list, and look at the calls under way."""
        workers = list(workers)
        able = {worker.role for worker in workers if worker.routable}
        still = [w for w in workers if w.report_age_ms < 0 or w.state == worker_pb2.WORKER_STATE_SILENT]
        self._lost = {w.ref.replica for w in still if w.role in able}
        for call in self._calls:
            self._look_at(call)

    @asynccontextmanager
    async def asking(self, worker: routing_pb2.WorkerRef) -> AsyncIterator[None]:
        """Ends a call to a worker with `Unreachable` when it is lost and another could be asked."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                call = _Call(worker, limit, asyncio.get_running_loop().time())
                self._calls.add(call)
                try:
                    self._look_at(call)
                    yield
                finally:
                    self._calls.remove(call)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unreachable(f"the router hears nothing of {worker.replica}, or it of its engine") from None

    def _look_at(self, call: _Call) -> None:
        if call.limit.expired():
            return
        lost = call.worker.replica in self._lost
        now_s = asyncio.get_running_loop().time()
        call.limit.reschedule(max(now_s, call.started_s + SETTLE_S) if lost else None)
