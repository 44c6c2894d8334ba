"""Follows each worker's load stream and keeps the pool current."""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.router.pool import Worker

log = structlog.get_logger()

RECONNECT_S = 0.5
"""Pause before a broken load stream is opened again, in seconds."""
GET_WORKER_TIMEOUT_S = 5.0
REPORTS_PER_SECOND = 10


class PoolWatcher:
    """Hears load reports; `changed` tells, and `revision` counts, when a worker came, went or changed."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self.changed = asyncio.Condition()
        self.revision = 0

    async def follow(self, worker: Worker, channel: grpc.aio.Channel) -> None:
        """Follow one worker for good. Waits on its stream, at most `silence_s` for the next report."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        while True:
            try:
                await self._follow_once(worker, stub)
            except grpc.aio.AioRpcError as error:
                log.debug("worker_unreachable", replica=worker.replica, code=error.code().name)
            except TimeoutError:
                log.warning("worker_silent", replica=worker.replica, silence_s=self._silence_s)
            if worker.reported_at_s != float("-inf"):
                log.info("worker_lost", replica=worker.replica, epoch=worker.epoch)
                worker.lost()
                await self._announce()
            await asyncio.sleep(RECONNECT_S)

    async def _follow_once(self, worker: Worker, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        description = await stub.GetWorker(worker_pb2.GetWorkerRequest(), timeout=GET_WORKER_TIMEOUT_S)
        worker.limits.CopyFrom(description.limits)
        stream = stub.WatchLoad(worker_pb2.WatchLoadRequest(max_per_second=REPORTS_PER_SECOND))
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    report = await stream.read()
                if report is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue] its stubs lack it
                    return
                if worker.heard(report, time.monotonic()):
                    log.info(
                        "worker_changed",
                        replica=worker.replica,
                        epoch=worker.epoch,
                        state=worker_pb2.WorkerState.Name(worker.state),
                        policy_version=str(worker.version),
                    )
                    await self._announce()
        finally:
            stream.cancel()

    async def _announce(self) -> None:
        async with self.changed:
            self.revision += 1
            self.changed.notify_all()
