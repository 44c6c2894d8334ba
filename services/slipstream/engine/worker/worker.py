"""One worker: an engine and what stands around it, and the loops that keep it going.

| loop | takes | waits for | unblocked by |
|---|---|---|---|
| engine | nothing; ends the process if the engine's thread dies | the thread | its end |
| versions | published versions, to refit and prefetch | the broadcaster's stream | a seal, or a reconnect every 0.5 s |
| peers | the other ranks, where all step together | its clock, once a second | one that ends, and this one with it |
| observe | cache events and busy intervals of the engine | its clock, 10 times a second | time |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
import structlog

from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2_grpc
from slipstream.common import tracing
from slipstream.common.errors import StateUnavailable
from slipstream.common.state import SERVING
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import Engine
from slipstream.engine.worker import telemetry
from slipstream.engine.worker.config import WorkerConfig
from slipstream.engine.worker.gate import WorkerGate
from slipstream.engine.worker.group import Peers, SoleRank, Updater, join
from slipstream.engine.worker.identity import WorkerIdentity
from slipstream.engine.worker.kv_events import KvEventLog
from slipstream.engine.worker.rows import RowsHolder, RowsServicer
from slipstream.engine.worker.salts import Salts
from slipstream.engine.worker.servicer import WorkerServicer
from slipstream.engine.worker.timeline import Timeline
from slipstream.engine.worker.updates import Applied, WorkerState, WorkerUpdates
from slipstream.weights.transport import WeightTransport

log = structlog.get_logger()

OBSERVE_INTERVAL_S = 0.1

Servicer = tuple[Callable[[Any, Any], None], Any, str]


class RunningEngine(Engine, Protocol):
    """An engine with a thread of its own."""

    async def wait(self) -> None:
        """Return when it was stopped, raise what ended it otherwise."""
        ...


class SharedVersions(Protocol):
    """The part of the run's shared state that this needs."""

    async def version(self, key: str) -> PolicyVersion: ...


class Worker:
    """Everything of a worker but the calls of its own pool."""

    def __init__(
        self,
        config: WorkerConfig,
        role: worker_pb2.WorkerRole,
        engine: RunningEngine,
        transport: WeightTransport,
        state: SharedVersions,
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        """`open_channel`: to the other ranks of its group, if it is in one."""
        self.engine = engine
        group = config.group.place
        self.identity = WorkerIdentity(config.replica, role, group=group)
        refits = not engine.capabilities.steps_in_group
        self.updates = WorkerUpdates(engine, transport, config.replica, self._serving_version, refits=refits)
        self.updater: Updater = SoleRank(self.updates)
        self.peers: Peers | None = None
        if group is not None:
            assert open_channel is not None
            self.updater, self.peers = join(
                group,
                config.group.addresses,
                self.identity.epoch,
                self.updates,
                open_channel,
                config.group.vote_timeout_s,
            )
        self.updates.on_applied = self._record_update
        self.gate = WorkerGate(self.identity, self.updates, Salts(engine), lambda: engine.silent_s)
        self.routes = RowsHolder(engine, self.identity)
        self.kv_events = KvEventLog()
        timeline = config.run_dir / "timeline" / f"{config.replica or 'worker'}.jsonl"
        self.timeline = Timeline(timeline, config.timeline_limit_bytes)
        tracing.write_to(self.timeline.file)
        self._listen = config.listen
        self._engine_name = config.engine.type
        self._weight_transports = sorted({"grpc", config.weights.transport})  # adapters go by the first in any case
        self._state = state
        updates = self.updates
        telemetry.observe(engine, lambda: updates.version, lambda: updates.state is WorkerState.STALE)

    def servicers(self) -> list[Servicer]:
        """What both pools serve."""
        worker = WorkerServicer(
            self.identity,
            self.engine,
            self.updates,
            self.updater,
            self.gate,
            self.kv_events,
            self._engine_name,
            self._weight_transports,
        )
        return [
            (worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "slipstream.api.inference.v1.WorkerService"),
            (rows_pb2_grpc.add_RowsServiceServicer_to_server, RowsServicer(self.routes), _ROWS_SERVICE),
        ]

    def loops(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        loops: dict[str, Callable[[], Awaitable[Any]]] = {
            "engine": self.engine.wait,
            "versions": self.updates.follow,
            "observe": self.observe,
        }
        if self.peers is not None and self.engine.capabilities.steps_in_group:
            loops["peers"] = self.peers.watch
        return loops

    async def bound(self, port: int) -> None:
        """Take note of the port that peers reach this worker at."""
        self.identity.address = self._listen.address(port)
        log.info("worker_started", replica=self.identity.replica, epoch=self.identity.epoch, port=port)

    async def observe(self) -> None:
        """Hand on what the engine did, for ever."""
        while True:
            await asyncio.sleep(OBSERVE_INTERVAL_S)
            self.observe_once()

    def observe_once(self) -> None:
        self.kv_events.absorb(self.engine.drain_kv_events())
        self.timeline.add(self.engine.drain_busy(), time.time())

    async def close(self) -> None:
        """Stop the engine and write the rest of the timeline."""
        await self.engine.stop()
        self.observe_once()
        self.timeline.close()

    async def _serving_version(self) -> PolicyVersion:
        if self.peers is not None and (version := await self.peers.version()):
            return version
        try:
            return await self._state.version(SERVING)
        except StateUnavailable as error:
            log.warning("serving_unknown", detail=error.message)
            return UNSET

    def _record_update(self, version: PolicyVersion, applied: Applied) -> None:
        end_s = time.time()
        telemetry.update_pause.observe(applied.report.pause_s)
        self.timeline.record(
            "update",
            end_s - applied.report.pause_s,
            end_s,
            version=str(version),
            in_flight_samples=applied.report.in_flight_samples,
        )


_ROWS_SERVICE = "slipstream.api.rollout.v1.RowsService"
