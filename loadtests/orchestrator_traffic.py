"""What the load test of the orchestrator puts around it: runners' traffic, and neighbours that answer at once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc, runner_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.runner.loops import ACQUIRE_WAIT_MS, CALL_SLACK_S, HEARTBEAT_WAIT_MS
from slipstream.runner.taking_up import MAX_REPORT_BYTES, MAX_REPORTS_PER_CALL

REPORT_PERIOD_S = 0.02
"""The runner's own default: groups that end within it are reported together."""
PROMPT_TOKENS = 100
PLAN_WAIT_MS = 2000


class Worker(worker_pb2_grpc.WorkerServiceServicer, rows_pb2_grpc.RowsServiceServicer):
    """Swaps weights at once, and holds routes that nobody fetches."""

    def __init__(self) -> None:
        self.version, self.pending = UNSET, UNSET
        self.released = 0

    async def GetWorker(self, request: Any, context: Any) -> worker_pb2.GetWorkerResponse:
        state = worker_pb2.WORKER_STATE_SERVING if self.version else worker_pb2.WORKER_STATE_STARTING
        version = self.version.to_proto() if self.version else None
        return worker_pb2.GetWorkerResponse(epoch="1", state=state, version=version)

    async def BeginUpdate(self, request: worker_pb2.BeginUpdateRequest, context: Any) -> Any:
        self.pending = PolicyVersion.from_proto(request.version)
        return worker_pb2.BeginUpdateResponse(worker_epoch="1")

    async def ApplyUpdate(self, request: worker_pb2.ApplyUpdateRequest, context: Any) -> Any:
        self.version = self.pending
        return worker_pb2.ApplyUpdateResponse()

    async def FinishUpdate(self, request: worker_pb2.FinishUpdateRequest, context: Any) -> Any:
        state = worker_pb2.WORKER_STATE_SERVING
        return worker_pb2.FinishUpdateResponse(version=self.version.to_proto(), state=state)

    async def EndSalts(self, request: Any, context: Any) -> Any:
        return worker_pb2.EndSaltsResponse()

    async def AbortUpdate(self, request: Any, context: Any) -> Any:
        return worker_pb2.AbortUpdateResponse()

    async def ReleaseRows(self, request: rows_pb2.ReleaseRowsRequest, context: Any) -> rows_pb2.ReleaseRowsResponse:
        self.released += len(request.keys)
        return rows_pb2.ReleaseRowsResponse(released_count=len(request.keys))


class Broadcaster(broadcast_pb2_grpc.BroadcastServiceServicer):
    """Says which version is sealed."""

    def __init__(self) -> None:
        self.newest = UNSET
        self._sealed = asyncio.Event()

    def seal(self, version: PolicyVersion) -> None:
        self.newest = version
        self._sealed.set()
        self._sealed = asyncio.Event()

    async def WatchVersions(self, request: broadcast_pb2.WatchVersionsRequest, context: Any) -> AsyncIterator[Any]:
        seen = PolicyVersion.from_proto(request.after)
        while True:
            waiting = self._sealed
            if self.newest > seen:
                seen = self.newest
                yield broadcast_pb2.WatchVersionsResponse(version=seen.to_proto())
            await waiting.wait()


@dataclass(frozen=True)
class Shape:
    """What each rollout is."""

    turns: int = 1
    turn_tokens: int = 200
    """Sampled in a turn; a tool's answer of a quarter of that comes between two turns."""

    @property
    def tokens(self) -> int:
        return PROMPT_TOKENS + self.turns * self.turn_tokens + (self.turns - 1) * (self.turn_tokens // 4)

    def ranges(self) -> list[types_pb2.RowRange]:
        stride = self.turn_tokens + self.turn_tokens // 4
        starts = [PROMPT_TOKENS + turn * stride for turn in range(self.turns)]
        return [types_pb2.RowRange(start=start, end=start + self.turn_tokens) for start in starts]


Keep = Callable[[runner_pb2.GroupReport], Any]


@dataclass
class Runner:
    """Speaks RunnerService as the runner does: one long poll for groups, one for cancellations, reports in batches."""

    name: str
    stub: Any
    """Of RunnerService."""
    slots: int
    shape: Shape
    mean_s: float
    """A group takes from half to one and a half times as long; the first ones are somewhere in the middle."""
    address: str
    """Where tokens and log-probabilities are, by what the records say."""
    routes_address: str
    keep: Keep | None = None
    """Awaited with each report before it is sent: what a spool does."""
    finished: int = 0
    """Rollouts whose report was taken."""
    refused: int = 0
    _running: dict[tuple[str, int], asyncio.TimerHandle | None] = field(default_factory=dict[Any, Any])
    _ended: asyncio.Queue[runner_pb2.GroupAssignment] = field(default_factory=asyncio.Queue)
    _free: asyncio.Event = field(default_factory=asyncio.Event)
    _draw: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def running(self) -> int:
        """Groups."""
        return len(self._running)

    def resize(self, slots: int, mean_s: float) -> None:
        """Run so many groups at once from now on, each so long."""
        self.slots, self.mean_s = slots, mean_s
        self._free.set()

    async def acquire(self) -> None:
        first = True
        while True:
            while len(self._running) >= self.slots:
                self._free.clear()
                await self._free.wait()
            answer = await self.stub.AcquireGroups(
                runner_pb2.AcquireGroupsRequest(
                    request_id=str(uuid4()),
                    runner_id=self.name,
                    runner_epoch="1",
                    max_groups=self.slots - len(self._running),
                    wait_ms=ACQUIRE_WAIT_MS,
                ),
                timeout=ACQUIRE_WAIT_MS / 1000 + CALL_SLACK_S,
            )
            loop = asyncio.get_running_loop()
            for assignment in answer.groups:
                low, high = (0.0, 1.0) if first else (0.5, 1.5)
                delay_s = self._draw.uniform(low, high) * self.mean_s
                key = (assignment.group_id, assignment.attempt)
                self._running[key] = loop.call_later(delay_s, self._ended.put_nowait, assignment)
            first = first and not answer.groups
            if answer.run_ended:
                await asyncio.sleep(0.5)

    async def heartbeat(self) -> None:
        acknowledged: list[runner_pb2.GroupAttempt] = []
        while True:
            answer = await self.stub.Heartbeat(
                runner_pb2.HeartbeatRequest(
                    runner_id=self.name,
                    runner_epoch="1",
                    running=[runner_pb2.GroupAttempt(group_id=g, attempt=a) for g, a in self._running],
                    acknowledged=acknowledged,
                    spool_limit_bytes=1 << 30,
                    wait_ms=HEARTBEAT_WAIT_MS,
                ),
                timeout=HEARTBEAT_WAIT_MS / 1000 + CALL_SLACK_S,
            )
            acknowledged = [cancellation.group for cancellation in answer.cancellations]
            for group in acknowledged:
                timer = self._running.pop((group.group_id, group.attempt), None)
                if timer is not None:
                    timer.cancel()
                self._free.set()

    async def report(self) -> None:
        while True:
            reports = [self._report(await self._ended.get())]
            await asyncio.sleep(REPORT_PERIOD_S)
            size_bytes = reports[0].ByteSize()
            while not self._ended.empty() and len(reports) < MAX_REPORTS_PER_CALL and size_bytes < MAX_REPORT_BYTES:
                reports.append(self._report(self._ended.get_nowait()))
                size_bytes += reports[-1].ByteSize()
            if self.keep is not None:
                for report in reports:
                    await self.keep(report)
            request = runner_pb2.ReportGroupsRequest(
                request_id=str(uuid4()), runner_id=self.name, runner_epoch="1", reports=reports
            )
            answer = await self.stub.ReportGroups(request, timeout=CALL_SLACK_S)
            self.refused += len(answer.refused)
            self.finished += sum(len(report.rollouts) for report in reports)
            for report in reports:
                self._running.pop((report.group.group_id, report.group.attempt), None)
            self._free.set()

    def _report(self, group: runner_pb2.GroupAssignment) -> runner_pb2.GroupReport:
        return runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=group.group_id, attempt=group.attempt),
            outcome=runner_pb2.GROUP_OUTCOME_FINISHED,
            rollouts=[self._record(group, index) for index in range(group.sample_count)],
            duration_ms=int(self.mean_s * 1000),
        )

    def _record(self, group: runner_pb2.GroupAssignment, index: int) -> runner_pb2.RolloutRecord:
        shape, name = self.shape, f"{group.group_id}.{group.attempt}.{index}"
        whole = [types_pb2.RowRange(start=0, end=shape.tokens)]
        sampled = shape.ranges()

        def ref(kind: str, dtype: str) -> types_pb2.RowsRef:
            size_bytes = 4 * shape.tokens
            key = f"{kind}/{name}"
            return types_pb2.RowsRef(holder=self.address, key=key, ranges=whole, dtype=dtype, size_bytes=size_bytes)

        def routes(kind: str, turn: int) -> types_pb2.RowsRef:
            key = f"{kind}/{name}.{turn}"
            return types_pb2.RowsRef(holder=self.routes_address, key=key, dtype="uint8", row_shape=[4, 2])

        return runner_pb2.RolloutRecord(
            rollout_id=name,
            sample_index=index,
            reward=float(index % 2),
            correct=bool(index % 2),
            prompt_token_count=PROMPT_TOKENS,
            token_count=shape.tokens,
            finish_reason=types_pb2.FINISH_REASON_STOP,
            loss_ranges=sampled,
            spans=[types_pb2.VersionSpan(token_count=shape.turn_tokens, version=group.dispatch_version)] * shape.turns,
            token_ids=ref("t", "int32"),
            logprobs=ref("l", "float32"),
            routes=[routes(kind, turn) for turn in range(shape.turns) for kind in "pd"] if self.keep is None else [],
            turn_count=shape.turns,
        )


@dataclass
class Trainer:
    """Asks for a plan, publishes the next version, reports the step; takes no time."""

    stub: Any
    """Of BatchService."""
    broadcaster: Broadcaster
    samples_per_step: int
    step: int = 0
    trained: Counter[str] = field(default_factory=Counter[str])
    """How often each group's samples were in a plan."""
    _stepped: asyncio.Event = field(default_factory=asyncio.Event)

    async def reaches(self, step: int) -> None:
        """Wait until it is trained."""
        while self.step < step:
            await self._stepped.wait()

    async def plan(self, step: int) -> batch_pb2.GetPlanResponse:
        request = batch_pb2.GetPlanRequest(incarnation=1, step=step, wait_ms=PLAN_WAIT_MS)
        return await self.stub.GetPlan(request, timeout=PLAN_WAIT_MS / 1000 + CALL_SLACK_S)

    async def train(self) -> None:
        """Until the run has ended."""
        self.broadcaster.seal(PolicyVersion(1, 0))
        while True:
            answer = await self.plan(self.step + 1)
            if answer.HasField("ended"):
                return
            if not answer.HasField("plan"):
                continue
            self._count(answer.plan)
            self.step += 1
            self._stepped.set()
            self._stepped = asyncio.Event()
            self.broadcaster.seal(PolicyVersion(1, self.step))
            await self.stub.ReportStep(
                batch_pb2.ReportStepRequest(request_id=str(uuid4()), version=answer.plan.version), timeout=CALL_SLACK_S
            )

    def _count(self, plan: batch_pb2.Plan) -> None:
        groups: Sequence[str] = [s.group_id for batch in plan.micro_batches for s in batch.sequences]
        if len(groups) != self.samples_per_step:
            raise RuntimeError(f"step {plan.version.step} has {len(groups)} samples, not {self.samples_per_step}")
        self.trained.update(groups)
