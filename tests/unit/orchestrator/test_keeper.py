"""What the version keeper tells workers about the salts they may forget, and when it pauses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import KeeperConfig
from slipstream.orchestrator.keeper import VersionKeeper, Worker
from slipstream.orchestrator.metrics import MetricsFile

SERVED, NEXT = PolicyVersion(2, 4), PolicyVersion(2, 5)
SERVING = worker_pb2.WORKER_STATE_SERVING


class Stub:
    """A worker that takes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _answer(self, request: Any, answer: Any) -> asyncio.Future[Any]:
        self.calls.append(request)
        future = asyncio.get_running_loop().create_future()
        future.set_result(answer)
        return future

    def told(self) -> list[tuple[list[PolicyVersion], PolicyVersion]]:
        """Running versions and the one groups are dispatched at, of each `EndSalts`."""
        return [
            ([PolicyVersion.from_proto(v) for v in c.running_versions], PolicyVersion.from_proto(c.dispatch_version))
            for c in self.calls
            if isinstance(c, worker_pb2.EndSaltsRequest)
        ]

    def BeginUpdate(self, request: worker_pb2.BeginUpdateRequest, timeout: float) -> Any:
        return self._answer(request, worker_pb2.BeginUpdateResponse())

    def ApplyUpdate(self, request: worker_pb2.ApplyUpdateRequest, timeout: float) -> Any:
        return self._answer(request, worker_pb2.ApplyUpdateResponse())

    def FinishUpdate(self, request: worker_pb2.FinishUpdateRequest, timeout: float) -> Any:
        return self._answer(request, worker_pb2.FinishUpdateResponse(version=NEXT.to_proto(), state=SERVING))

    def EndSalts(self, request: worker_pb2.EndSaltsRequest, timeout: float) -> Any:
        return self._answer(request, worker_pb2.EndSaltsResponse())


@pytest.fixture
def make_keeper(tmp_path: Path) -> Callable[..., tuple[VersionKeeper, Stub, Worker]]:
    def make(running: set[PolicyVersion], until_cancelled: Any = None) -> tuple[VersionKeeper, Stub, Worker]:
        async def nothing_to_cancel(timeout_s: float) -> bool:
            return True

        stub = Stub()
        worker = Worker("decode-1", "decode", cast(Any, stub), "a", SERVING, SERVED, seen_at=time.monotonic())
        keeper = VersionKeeper(
            "run",
            KeeperConfig(),
            [worker],
            cast(Any, None),
            on_published=lambda version: None,
            on_serving=lambda version: None,
            until_cancelled=until_cancelled or nothing_to_cancel,
            metrics=MetricsFile(tmp_path / "metrics.jsonl", time.time),
            running_versions=lambda: set(running),
            published=NEXT,
            serving=SERVED,
        )
        return keeper, stub, worker

    return make


async def test_a_worker_is_told_once_each_time_a_version_loses_its_last_group_or_is_new(make_keeper):
    running = {PolicyVersion(1, 3), PolicyVersion(2, 2)}
    keeper, stub, worker = make_keeper(running)
    await keeper.tell_salts()
    await keeper.tell_salts()
    assert stub.told() == [([PolicyVersion(1, 3), PolicyVersion(2, 2), SERVED], SERVED)]
    running.discard(PolicyVersion(1, 3))
    await keeper.tell_salts()
    await keeper.roll([worker], NEXT)
    await keeper.tell_salts()
    assert stub.told()[1:] == [([PolicyVersion(2, 2), SERVED], SERVED), ([PolicyVersion(2, 2), NEXT], NEXT)]


async def test_a_worker_that_started_again_is_told_again_and_a_stale_one_when_it_is_back(make_keeper):
    keeper, stub, worker = make_keeper(set())
    await keeper.tell_salts()
    worker.see("b", worker_pb2.WORKER_STATE_STALE, SERVED, time.monotonic())
    await keeper.tell_salts()
    assert len(stub.told()) == 1
    worker.see("b", SERVING, SERVED, time.monotonic())
    await keeper.tell_salts()
    assert len(stub.told()) == 2
    assert stub.calls[-1].worker_epoch == "b"


async def test_no_worker_pauses_before_the_engines_have_let_go_of_what_was_cancelled(make_keeper):
    acknowledged = asyncio.Event()

    async def until_acknowledged(timeout_s: float) -> bool:
        await acknowledged.wait()
        return True

    keeper, stub, worker = make_keeper(set(), until_acknowledged)
    rolling = asyncio.create_task(keeper.roll([worker], NEXT))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [type(call) for call in stub.calls] == [worker_pb2.BeginUpdateRequest]  # fetching does not wait
    acknowledged.set()
    await rolling
    assert [type(call) for call in stub.calls[1:]] == [worker_pb2.ApplyUpdateRequest, worker_pb2.FinishUpdateRequest]
    assert worker.version == NEXT
