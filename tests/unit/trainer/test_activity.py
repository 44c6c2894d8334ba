"""What the trainer does is said when it changes, and again to an orchestrator that may have been started since."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc.aio import Metadata

from slipstream.trainer.status import REPEAT_PERIOD_S, ActivityReporter, Status


class Orchestrator:
    """Takes reports, unless it is away."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.away = False

    async def ReportActivity(self, request: Any, timeout: float) -> None:
        if self.away:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata())
        self.heard.append(request.activity)


@pytest.fixture
def orchestrator() -> Orchestrator:
    return Orchestrator()


async def test_what_goes_on_is_said_again_after_a_while(orchestrator: Orchestrator) -> None:
    now, status = [100.0], Status()
    reporter = ActivityReporter(orchestrator, status, lambda: now[0])  # type: ignore[arg-type]
    for activity in ("starting", "saving"):
        status.enter(activity)
        for _ in range(3):
            await reporter.report()
    assert orchestrator.heard == ["starting", "saving"]
    now[0] += REPEAT_PERIOD_S
    for _ in range(3):
        await reporter.report()
    assert orchestrator.heard == ["starting", "saving", "saving"]


async def test_what_was_not_heard_is_said_at_the_next_turn(orchestrator: Orchestrator) -> None:
    reporter = ActivityReporter(orchestrator, Status())  # type: ignore[arg-type]
    orchestrator.away = True
    await reporter.report()
    orchestrator.away = False
    await reporter.report()
    assert orchestrator.heard == ["starting"]
