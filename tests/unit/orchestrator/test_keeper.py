"""What the version keeper tells a worker about the salts it may forget."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import KeeperConfig
from slipstream.orchestrator.keeper import VersionKeeper, Worker
from slipstream.orchestrator.metrics import MetricsFile

SERVED, NEXT = PolicyVersion(2, 4), PolicyVersion(2, 5)


class Stub:
    """A worker that takes every update."""

    def __init__(self) -> None:
        self.finished: list[worker_pb2.FinishUpdateRequest] = []

    def _answer(self, answer: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(answer)
        return future

    def BeginUpdate(self, request: worker_pb2.BeginUpdateRequest, timeout: float) -> Any:
        return self._answer(worker_pb2.BeginUpdateResponse())

    def ApplyUpdate(self, request: worker_pb2.ApplyUpdateRequest, timeout: float) -> Any:
        return self._answer(worker_pb2.ApplyUpdateResponse())

    def FinishUpdate(self, request: worker_pb2.FinishUpdateRequest, timeout: float) -> Any:
        self.finished.append(request)
        state = worker_pb2.WORKER_STATE_SERVING
        return self._answer(worker_pb2.FinishUpdateResponse(version=NEXT.to_proto(), state=state))


async def test_an_update_says_which_versions_groups_run_at_or_may_be_dispatched_at(tmp_path: Path):
    async def nothing_to_cancel(timeout_s: float) -> bool:
        return True

    stub = Stub()
    worker = Worker("decode-1", "decode", cast(Any, stub), seen_at=time.monotonic(), version=SERVED)
    keeper = VersionKeeper(
        "run",
        KeeperConfig(),
        [worker],
        cast(Any, None),
        on_published=lambda version: None,
        on_serving=lambda version: None,
        until_cancelled=nothing_to_cancel,
        metrics=MetricsFile(tmp_path / "metrics.jsonl", time.time),
        running_versions=lambda: {PolicyVersion(1, 3), PolicyVersion(2, 2)},
        published=NEXT,
        serving=SERVED,
    )
    await keeper.roll([worker], NEXT)
    (request,) = stub.finished
    live = [PolicyVersion.from_proto(version) for version in request.live_versions]
    assert live == [PolicyVersion(1, 3), PolicyVersion(2, 2), SERVED, NEXT]
    assert worker.version == NEXT
