"""A whole orchestrator in this process, with stand-ins for the services it talks to."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.api.rollout.v1 import (
    rollout_pb2_grpc,
    rows_pb2,
    rows_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
)
from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.errors import VersionNotNewer, WeightsCorrupt, refuse
from slipstream.common.runtime import Service
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator.__main__ import Orchestrator
from slipstream.orchestrator.config import EnvironmentConfig, KeeperConfig, OrchestratorConfig, WorkerConfig


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that swaps at once. `calls` is shared by all of them, to see their order."""

    def __init__(self, replica: str, role: str, calls: list[tuple[str, str, str]]) -> None:
        self.replica, self.role, self.calls = replica, role, calls
        self.version = UNSET
        self.state: worker_pb2.WorkerState = worker_pb2.WORKER_STATE_STARTING
        self.pending: dict[str, PolicyVersion] = {}
        self.corrupt_applies = 0
        self.live: set[str] = set()
        self.address = ""

    async def GetWorker(self, request: Any, context: Any) -> worker_pb2.GetWorkerResponse:
        version = self.version.to_proto() if self.version else None
        return worker_pb2.GetWorkerResponse(replica=self.replica, epoch="1", state=self.state, version=version)

    async def BeginUpdate(self, request: worker_pb2.BeginUpdateRequest, context: Any) -> Any:
        if PolicyVersion.from_proto(request.version) <= self.version and self.state != worker_pb2.WORKER_STATE_STALE:
            await refuse(context, VersionNotNewer("served already"))
        self.pending[request.update_id] = PolicyVersion.from_proto(request.version)
        self.calls.append(("begin", self.replica, str(self.pending[request.update_id])))
        return worker_pb2.BeginUpdateResponse(worker_epoch="1")

    async def ApplyUpdate(self, request: worker_pb2.ApplyUpdateRequest, context: Any) -> Any:
        version = self.pending[request.update_id]
        if self.corrupt_applies:
            self.corrupt_applies -= 1
            self.state = worker_pb2.WORKER_STATE_STALE
            self.calls.append(("corrupt", self.replica, str(version)))
            await refuse(context, WeightsCorrupt("a checksum differs"))
        self.version, self.state = version, worker_pb2.WORKER_STATE_SERVING
        self.calls.append(("apply", self.replica, str(version)))
        return worker_pb2.ApplyUpdateResponse(pause_us=1000, in_flight_sample_count=3)

    async def FinishUpdate(self, request: worker_pb2.FinishUpdateRequest, context: Any) -> Any:
        return worker_pb2.FinishUpdateResponse(version=self.version.to_proto(), state=self.state)

    async def EndSalts(self, request: worker_pb2.EndSaltsRequest, context: Any) -> Any:
        self.live = {str(PolicyVersion.from_proto(version)) for version in request.running_versions}
        return worker_pb2.EndSaltsResponse()

    async def AbortUpdate(self, request: worker_pb2.AbortUpdateRequest, context: Any) -> Any:
        self.calls.append(("abort", self.replica, ""))
        return worker_pb2.AbortUpdateResponse()


class FakeBroadcaster(broadcast_pb2_grpc.BroadcastServiceServicer):
    """Says which version is sealed."""

    def __init__(self) -> None:
        self.newest = UNSET
        self.sealed = asyncio.Event()
        self.address = ""

    def seal(self, version: PolicyVersion) -> None:
        self.newest = version
        self.sealed.set()
        self.sealed = asyncio.Event()

    async def WatchVersions(self, request: broadcast_pb2.WatchVersionsRequest, context: Any) -> AsyncIterator[Any]:
        seen = PolicyVersion.from_proto(request.after)
        while True:
            waiting = self.sealed
            if self.newest > seen:
                seen = self.newest
                yield broadcast_pb2.WatchVersionsResponse(version=seen.to_proto())
            await waiting.wait()


class FakeRows(rows_pb2_grpc.RowsServiceServicer):
    """Remembers what was released."""

    def __init__(self) -> None:
        self.released: set[str] = set()
        self.address = ""

    async def ReleaseRows(self, request: rows_pb2.ReleaseRowsRequest, context: Any) -> rows_pb2.ReleaseRowsResponse:
        self.released.update(request.keys)
        return rows_pb2.ReleaseRowsResponse(released_count=len(request.keys))


class World:
    """An orchestrator, its neighbours, and clients of its services."""

    def __init__(self, orchestrator: Orchestrator, neighbours: dict[str, Any], channel: grpc.aio.Channel) -> None:
        self.orchestrator = orchestrator
        self.workers: list[FakeWorker] = neighbours["workers"]
        self.broadcaster: FakeBroadcaster = neighbours["broadcaster"]
        self.rows: FakeRows = neighbours["rows"]
        self.calls: list[tuple[str, str, str]] = neighbours["calls"]
        self.address: str = neighbours["address"]
        self.runners: Any = runner_pb2_grpc.RunnerServiceStub(channel)
        self.batches: Any = batch_pb2_grpc.BatchServiceStub(channel)
        self.rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.runs: Any = run_pb2_grpc.RunServiceStub(channel)
        self.session_address = ""
        """Where the runner serves sessions; empty: it takes none."""
        self.trained: Counter[str] = Counter()
        self.plans: list[batch_pb2.Plan] = []
        self.assignments: list[runner_pb2.GroupAssignment] = []
        self.cancelled: list[tuple[str, str]] = []

    def publish(self, step: int) -> None:
        self.broadcaster.seal(PolicyVersion(1, step))

    async def acquire(self, count: int = 64, wait_ms: int = 500, epoch: str = "1") -> list[runner_pb2.GroupAssignment]:
        answer = await self.runners.AcquireGroups(
            runner_pb2.AcquireGroupsRequest(
                request_id=uuid.uuid4().hex,
                runner_id="runner-1",
                runner_epoch=epoch,
                max_groups=count,
                wait_ms=wait_ms,
                address=self.session_address,
            ),
            timeout=60,
        )
        self.assignments += answer.groups
        return list(answer.groups)

    async def report(self, *reports: runner_pb2.GroupReport, epoch: str = "1") -> runner_pb2.ReportGroupsResponse:
        return await self.runners.ReportGroups(
            runner_pb2.ReportGroupsRequest(
                request_id=uuid.uuid4().hex, runner_id="runner-1", runner_epoch=epoch, reports=reports
            ),
            timeout=60,
        )

    async def heartbeat(
        self, wait_ms: int = 0, acknowledged: tuple[Any, ...] = (), epoch: str = "1", **fields: Any
    ) -> runner_pb2.HeartbeatResponse:
        return await self.runners.Heartbeat(
            runner_pb2.HeartbeatRequest(
                runner_id="runner-1", runner_epoch=epoch, acknowledged=acknowledged, wait_ms=wait_ms, **fields
            ),
            timeout=60,
        )

    async def run(self) -> run_pb2.Run:
        return (await self.runs.GetRun(run_pb2.GetRunRequest(), timeout=60)).run

    async def until(self, condition: Callable[[run_pb2.Run], bool], timeout_s: float = 60.0) -> run_pb2.Run:
        async with asyncio.timeout(timeout_s):
            while True:
                run = await self.run()
                if condition(run):
                    return run
                await asyncio.sleep(0.02)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        path = self.orchestrator.sequencer.config.run_dir / "metrics.jsonl"
        return [record for line in path.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]

    def finished(self, group: runner_pb2.GroupAssignment, *, spread: bool = True) -> runner_pb2.GroupReport:
        """A report of a group that ended well, with or without variance in its rewards."""
        return runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=group.group_id, attempt=group.attempt),
            outcome=runner_pb2.GROUP_OUTCOME_FINISHED,
            rollouts=[self._record(group, i, float(i % 2) if spread else 1.0) for i in range(group.sample_count)],
        )

    def failed(self, group: runner_pb2.GroupAssignment) -> runner_pb2.GroupReport:
        return runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=group.group_id, attempt=group.attempt),
            outcome=runner_pb2.GROUP_OUTCOME_FAILED,
            reason="ENVIRONMENT_ERROR",
            detail="division by zero",
        )

    def _record(self, group: runner_pb2.GroupAssignment, index: int, reward: float) -> runner_pb2.RolloutRecord:
        name = f"{group.group_id}.{group.attempt}.{index}"
        return runner_pb2.RolloutRecord(
            rollout_id=name,
            sample_index=index,
            reward=reward,
            correct=reward == 1.0,
            prompt_token_count=11,
            token_count=16,
            loss_ranges=[types_pb2.RowRange(start=11, end=16)],
            spans=[types_pb2.VersionSpan(token_count=5, version=group.dispatch_version)],
            token_ids=types_pb2.RowsRef(holder=self.rows.address, key=f"{name}/t", dtype="int32"),
            logprobs=types_pb2.RowsRef(holder=self.rows.address, key=f"{name}/l", dtype="float32"),
        )

    async def runner_loop(self, *, filtered_every: int = 5) -> None:
        """Stand in for a runner: every group ends at once, each fifth without variance."""
        number = 0
        while True:
            groups = await self.acquire(count=4)
            reports = []
            for group in groups:
                number += 1
                reports.append(self.finished(group, spread=number % filtered_every != 0))
            if reports:
                await self.report(*reports)

    async def heartbeat_loop(self) -> None:
        """Stand in for a runner's heartbeat: what is cancelled is dropped at once."""
        acknowledged: tuple[Any, ...] = ()
        while True:
            answer = await self.heartbeat(wait_ms=300, acknowledged=acknowledged)
            acknowledged = tuple(cancellation.group for cancellation in answer.cancellations)
            self.cancelled += [(c.group.group_id, c.reason) for c in answer.cancellations]

    async def plan(self, step: int, wait_ms: int = 20_000) -> batch_pb2.GetPlanResponse:
        return await self.batches.GetPlan(
            batch_pb2.GetPlanRequest(incarnation=1, step=step, wait_ms=wait_ms), timeout=60
        )

    async def train(self, plan: batch_pb2.Plan) -> batch_pb2.ReportStepResponse:
        for batch in plan.micro_batches:
            self.trained.update(sequence.rollout_id for sequence in batch.sequences)
        self.plans.append(plan)
        self.publish(plan.version.step)
        return await self.batches.ReportStep(
            batch_pb2.ReportStepRequest(request_id=uuid.uuid4().hex, version=plan.version, metrics={"loss": 0.5}),
            timeout=60,
        )

    async def trainer_loop(self) -> None:
        """Stand in for the trainer: publishes the base model, then one version a plan."""
        self.publish(0)
        step = 1
        while True:
            answer = await self.plan(step)
            if answer.HasField("ended"):
                return
            if answer.HasField("plan"):
                await self.train(answer.plan)
                step += 1


@pytest.fixture
def make_world(make_config: Callable[..., OrchestratorConfig], valkey_url: str) -> Callable[..., Any]:
    """`async with make_world(total_steps=3) as world:`; fields are those of the orchestrator's config."""

    @asynccontextmanager
    async def make(*, redis_url: str = valkey_url, **fields: Any) -> AsyncIterator[World]:
        calls: list[tuple[str, str, str]] = []
        workers = [
            FakeWorker("decode-1", "decode", calls),
            FakeWorker("decode-2", "decode", calls),
            FakeWorker("prefill-1", "prefill", calls),
        ]
        broadcaster, rows = FakeBroadcaster(), FakeRows()
        async with AsyncExitStack() as stack:
            for servicer, add in (
                *((worker, worker_pb2_grpc.add_WorkerServiceServicer_to_server) for worker in workers),
                (broadcaster, broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server),
                (rows, rows_pb2_grpc.add_RowsServiceServicer_to_server),
            ):
                server = grpc.aio.server()
                add(servicer, server)
                servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
                await server.start()
                stack.push_async_callback(server.stop, None)
            defaults: dict[str, Any] = {
                "total_steps": 3,
                "groups_per_step": 4,
                "samples_per_group": 2,
                "max_off_policy_steps": 1,
                "step_quotas": False,
                "evaluate_before": False,
                "evaluate_after": False,
                "environments": [
                    EnvironmentConfig(name="words", weight=3, evaluation_task_count=6),
                    EnvironmentConfig(name="numbers", weight=1, evaluation_task_count=3),
                ],
                "keeper": KeeperConfig(poll_interval_s=0.1, away_after_s=1.0, refit_backoff_s=0.05),
            }
            config = make_config(
                OrchestratorConfig,
                redis_url=redis_url,
                workers=[WorkerConfig(replica=w.replica, role=w.role, address=w.address) for w in workers],  # type: ignore[arg-type]
                broadcaster=broadcaster.address,
                **{**defaults, **fields},
            )
            orchestrator = Orchestrator(config)
            stack.push_async_callback(orchestrator.close)
            service = Service(config, orchestrator.servicers)
            await service.start()
            stack.push_async_callback(service.stop)
            channel = open_channel(f"127.0.0.1:{service.port}", Access())
            stack.push_async_callback(channel.close)
            neighbours: dict[str, Any] = {
                "workers": workers,
                "broadcaster": broadcaster,
                "rows": rows,
                "calls": calls,
                "address": f"127.0.0.1:{service.port}",
            }
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(_forever(loop)) for loop in orchestrator.loops.values()]
                try:
                    yield World(orchestrator, neighbours, channel)
                finally:
                    for loop in loops:
                        loop.cancel()

    return make


async def _forever(loop: Callable[[], Any]) -> None:
    await loop()
    raise AssertionError("a loop returned")


@asynccontextmanager
async def _background(*coroutines: Any) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@pytest.fixture
def background() -> Callable[..., Any]:
    """`async with background(coroutine, ...):` runs them until the block ends; one that fails ends the block."""
    return _background
