"""What the trainer is doing, for its own RPC and for the orchestrator's run state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn
from uuid import uuid4

import grpc
import structlog

from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc
from slipstream.common.version import UNSET, PolicyVersion

log = structlog.get_logger()

REPORT_PERIOD_S = 0.5
REPORT_TIMEOUT_S = 5.0
REPEAT_PERIOD_S = 5.0
"""How often it is said again though nothing changed: an orchestrator that was started again knows nothing of it."""


@dataclass
class Status:
    """Written by the training loop (and, field by field, by the torch thread), read by others."""

    activity: str = "starting"
    """One of the names in TrainerService.GetStatus."""

    fraction_done: float = 0.0
    version: PolicyVersion = UNSET
    parameter_count: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    waiting_for_room: set[object] = field(default_factory=set)
    """One member for each thing made that finds no room, here or at the broadcaster."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by Stop: end after the step at hand."""

    @property
    def disk_full(self) -> bool:
        return bool(self.waiting_for_room)

    @property
    def shown_activity(self) -> str:
        """What others are told."""
        return "disk_full" if self.disk_full else self.activity

    def enter(self, activity: str) -> None:
        self.activity, self.fraction_done = activity, 0.0


class ActivityReporter:
    """Tells the orchestrator what happens outside of steps. Lost reports do not matter: the next one says more."""

    def __init__(
        self, stub: batch_pb2_grpc.BatchServiceStub, status: Status, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stub = stub
        self._status = status
        self._clock = clock
        self._reported: object = None
        self._reported_at = 0.0

    async def run(self) -> NoReturn:
        while True:
            await self.report()
            await asyncio.sleep(REPORT_PERIOD_S)

    async def report(self) -> None:
        """Report if something changed since the last time, or that was long ago."""
        # Between steps activities change several times a second and the step's own report tells enough.
        activity = self._status.shown_activity
        activity = activity if activity in ("starting", "sft", "saving", "ended", "disk_full") else "training"
        state = (activity, self._status.fraction_done)
        if state == self._reported and self._clock() - self._reported_at < REPEAT_PERIOD_S:
            return
        metrics = self._status.metrics if activity == "sft" else {}
        request = batch_pb2.ReportActivityRequest(activity=activity, fraction_done=state[1], metrics=metrics)
        try:
            await self._stub.ReportActivity(request, timeout=REPORT_TIMEOUT_S)
            self._reported, self._reported_at = state, self._clock()
        except grpc.aio.AioRpcError as error:
            log.debug("activity_not_reported", code=error.code().name)


def request_id(kind: str) -> str:
    """A fresh name for one call."""
    return f"{kind}-{uuid4().hex}"
