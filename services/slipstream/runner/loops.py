"""The runner's loops: acquire groups, run them, report them, heartbeat.

| loop | takes | waits for | unblocked by |
|---|---|---|---|
| acquire | free group slots | a slot; `AcquireGroups` | a report taken; the orchestrator |
| heartbeat | leases, acknowledgements | `Heartbeat` long poll | a cancellation, or 1 s |
| rollouts | logged rollouts that found no room | its clock | room on the disk |
| taking up | finished groups that are held | another process of the orchestrator; `ReportGroups` | a heartbeat |
| report | finished groups | the report queue; `ReportGroups` | a finished group; the orchestrator |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import grpc
import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.errors import (
    Draining,
    EnvironmentFailed,
    InvalidRequest,
    RunnerSuperseded,
    SlipstreamError,
    Unauthenticated,
    Unreachable,
    Unsupported,
    from_rpc_error,
)
from slipstream.runner.attempt import attempt_name
from slipstream.runner.envclient import RenderedPrompt
from slipstream.runner.envpool import EnvironmentPool
from slipstream.runner.groups import GroupRunner, task_of
from slipstream.runner.outage import Outage
from slipstream.runner.peers import Peers
from slipstream.runner.records import refs_of
from slipstream.runner.rollout_log import RolloutLog
from slipstream.runner.sessions import SessionRunner
from slipstream.runner.spool import Spool
from slipstream.runner.taking_up import MAX_REPORT_BYTES, MAX_REPORTS_PER_CALL, TakingUp
from slipstream.runner.unfinished import Unfinished

log = structlog.get_logger()

ACQUIRE_WAIT_MS = 10_000
HEARTBEAT_WAIT_MS = 1_000
CALL_SLACK_S = 10.0
"""What a long poll's deadline adds to its wait, in seconds."""
RETRY_S = 0.5
SPOOL_FULL_WAIT_S = 0.1
SETTLE_S = 0.2
"""Longest wait for cancelled groups before the next heartbeat, in seconds."""

FINAL = (RunnerSuperseded, InvalidRequest, Unauthenticated, Unsupported)
"""What no repeat of the same call heals."""

AttemptKey = tuple[str, int]


@dataclass
class Running:
    """One group in progress."""

    assignment: runner_pb2.GroupAssignment
    unfinished: Unfinished | None = None
    """What an earlier process of this runner left of it."""
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    left: bool = False
    """To the next process, as this one ends before its sessions would."""


class RunnerLoops:
    """State shared by the loops. One a process."""

    def __init__(
        self,
        runner_id: str,
        epoch: str,
        peers: Peers,
        environments: EnvironmentPool,
        groups: GroupRunner,
        sessions: SessionRunner,
        spool: Spool,
        rollout_log: RolloutLog,
        max_running_groups: int,
        report_period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner_id = runner_id
        self._epoch = epoch
        self._peers = peers
        self._environments = environments
        self._groups = groups
        self._sessions = sessions
        self._spool = spool
        self._rollout_log = rollout_log
        self._report_period_s = report_period_s
        self._clock = clock
        self._max_running = max_running_groups
        self._slots = asyncio.Semaphore(max_running_groups)
        self._running: dict[AttemptKey, Running] = {}
        self._reports: asyncio.Queue[runner_pb2.GroupReport] = asyncio.Queue(max_running_groups)
        self._acknowledged: list[AttemptKey] = []
        self._group_tasks: asyncio.TaskGroup | None = None
        self._unreported = 0
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._outage = Outage("orchestrator", clock)
        self.taking_up = TakingUp(spool, self._report)
        self.draining = False

    @property
    def _disk_full(self) -> bool:
        return self._rollout_log.full or self._spool.waiting_count > 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    async def acquire_loop(self) -> None:
        try:
            await self._acquire_and_run()
        except* SlipstreamError as refused:
            raise refused.exceptions[0] from None  # bare: its message ends in the process's last line

    async def _acquire_and_run(self) -> None:
        async with asyncio.TaskGroup() as self._group_tasks:
            await self._take_up()
            request: runner_pb2.AcquireGroupsRequest | None = None
            while True:
                await self._slots.acquire()
                self._slots.release()
                if self._spool.full or self._disk_full or self.draining:
                    await asyncio.sleep(SPOOL_FULL_WAIT_S)
                    continue
                request = request or self._acquire_request()
                try:
                    response = await self._peers.orchestrator.AcquireGroups(
                        request, timeout=ACQUIRE_WAIT_MS / 1000 + CALL_SLACK_S
                    )
                except grpc.aio.AioRpcError as error:
                    await self._retry_or_raise(error, "acquire")
                    # The same request, though more is free by now: under its id no other is taken, and what was handed
                    # out is not lost.
                    continue
                self._outage.answered()
                request = None
                if response.groups:
                    await self._start(list(response.groups))
                elif response.run_ended:
                    await asyncio.sleep(RETRY_S)

    def _acquire_request(self) -> runner_pb2.AcquireGroupsRequest:
        return runner_pb2.AcquireGroupsRequest(
            request_id=str(uuid4()),
            runner_id=self._runner_id,
            runner_epoch=self._epoch,
            max_groups=max(self._max_running - len(self._running), 1),
            wait_ms=ACQUIRE_WAIT_MS,
            address=self._sessions.address,
        )

    async def _take_up(self) -> None:
        """Go on with what an earlier process of this runner was at, as far as nobody else has it by now."""
        assert self._group_tasks is not None
        for unfinished in self._spool.unfinished[self._max_running :]:
            self._spool.drop(unfinished.name)  # fewer may run at once than before: others get these
        left = self._spool.unfinished[: self._max_running]
        for unfinished in left:
            assignment = unfinished.assignment
            await self._slots.acquire()
            self._running[assignment.group_id, assignment.attempt] = Running(assignment, unfinished)
        await self.taking_up.registered.wait()
        for unfinished in left:
            assignment = unfinished.assignment
            of_sessions = assignment.HasField("session_group")
            run = self._run_group(assignment, None) if of_sessions else self._render_and_run([assignment])
            self._group_tasks.create_task(run)

    async def _start(self, assignments: list[runner_pb2.GroupAssignment]) -> None:
        """Give each group a slot and a task; prompts are rendered in one call for each environment, those that third
        parties sent by themselves: together they may be longer than a call may be, and none but their own groups
        should fail by them.
        """
        assert self._group_tasks is not None
        for assignment in assignments:
            await self._slots.acquire()
            self._running[assignment.group_id, assignment.attempt] = Running(assignment)
            self._spool.begin(attempt_name(assignment), assignment)
            if assignment.HasField("session_group"):
                self._group_tasks.create_task(self._run_group(assignment, None))
        assignments = [assignment for assignment in assignments if not assignment.HasField("session_group")]
        sent = [assignment for assignment in assignments if assignment.HasField("prompt")]
        by_environment: dict[str, list[runner_pb2.GroupAssignment]] = {}
        for assignment in assignments:
            if not assignment.HasField("prompt"):
                by_environment.setdefault(assignment.environment, []).append(assignment)
        for together in (*by_environment.values(), *([a] for a in sent)):
            self._group_tasks.create_task(self._render_and_run(together))

    async def _render_and_run(self, assignments: list[runner_pb2.GroupAssignment]) -> None:
        assert self._group_tasks is not None
        try:
            prompts = await self._environments.prompts([task_of(assignment) for assignment in assignments])
        except EnvironmentFailed as error:
            for assignment in assignments:
                await self._end(assignment, self._failed(assignment, error))
            return
        for assignment, prompt in zip(assignments, prompts, strict=True):
            if isinstance(prompt, SlipstreamError):
                await self._end(assignment, self._failed(assignment, prompt))
            else:
                self._group_tasks.create_task(self._run_group(assignment, prompt))

    async def _run_group(self, assignment: runner_pb2.GroupAssignment, prompt: RenderedPrompt | None) -> None:
        """`prompt`: None where the members are sessions."""
        running = self._running[assignment.group_id, assignment.attempt]
        if running.cancelled:
            await self._end(assignment, None)
            return
        # From here on only: a task that is cancelled before its first step would never come to `_end`.
        running.task = asyncio.current_task()
        report: runner_pb2.GroupReport | None = None
        try:
            if prompt is None:
                report = await self._sessions.run(assignment, running.unfinished)
            else:
                report = await self._groups.run(assignment, prompt, running.unfinished)
        except asyncio.CancelledError:
            if running.left:
                self._running.pop((assignment.group_id, assignment.attempt), None)
                self._check_idle()
            if not running.cancelled:
                raise  # the process ends
        except Exception as error:  # a bad rollout is data
            log.exception("group_failed", group_id=assignment.group_id)
            report = self._failed(assignment, error)
        await self._end(assignment, report)

    def _failed(self, assignment: runner_pb2.GroupAssignment, error: Exception) -> runner_pb2.GroupReport:
        return runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=assignment.group_id, attempt=assignment.attempt),
            outcome=runner_pb2.GROUP_OUTCOME_FAILED,
            reason=getattr(error, "reason", "RUNNER_ERROR"),
            detail=str(error)[:4096],
        )

    async def _end(self, assignment: runner_pb2.GroupAssignment, report: runner_pb2.GroupReport | None) -> None:
        """Queue the report, or acknowledge the cancellation, and free the slot."""
        key = (assignment.group_id, assignment.attempt)
        running = self._running.pop(key, None)
        self._spool.drop(attempt_name(assignment))
        if running is not None and running.cancelled:
            self._acknowledged.append(key)
            self._check_settled()
            if report is not None:
                self._drop(report)
        elif report is not None:
            self._unreported += 1
            await self._reports.put(report)
        self._slots.release()
        self._check_idle()

    def _check_idle(self) -> None:
        if self.draining and not self._running and self._unreported == 0:
            self._idle.set()

    def _check_settled(self) -> None:
        if not any(running.cancelled for running in self._running.values()):
            self._settled.set()

    def _drop(self, report: runner_pb2.GroupReport) -> None:
        keys, routes = refs_of(report)
        for key in keys:
            self._spool.release(key)
        self._peers.release_routes(routes)

    async def heartbeat_loop(self) -> None:
        while True:
            acknowledged, self._acknowledged = self._acknowledged, []
            try:
                response = await self._peers.orchestrator.Heartbeat(
                    runner_pb2.HeartbeatRequest(
                        runner_id=self._runner_id,
                        runner_epoch=self._epoch,
                        running=[runner_pb2.GroupAttempt(group_id=g, attempt=a) for g, a in self._running],
                        acknowledged=[runner_pb2.GroupAttempt(group_id=g, attempt=a) for g, a in acknowledged],
                        spool_bytes=self._spool.size_bytes,
                        spool_limit_bytes=self._spool.limit_bytes,
                        disk_full=self._disk_full,
                        ended_sessions=self._sessions.ended(),
                        wait_ms=HEARTBEAT_WAIT_MS,
                        reported_to_epoch=self.taking_up.reported_to_epoch,
                    ),
                    timeout=HEARTBEAT_WAIT_MS / 1000 + CALL_SLACK_S,
                )
            except grpc.aio.AioRpcError as error:
                self._acknowledged = acknowledged + self._acknowledged
                await self._retry_or_raise(error, "heartbeat")
                continue
            self._outage.answered()
            if response.cancellations:
                self._settled.clear()
                self._cancel(list(response.cancellations))
                self._check_settled()
                # An update waits for the acknowledgements: send them as soon as all engines have let go.
                with suppress(TimeoutError):
                    async with asyncio.timeout(SETTLE_S):
                        await self._settled.wait()
            self.taking_up.heard(response.orchestrator_epoch)

    def _cancel(self, cancellations: list[runner_pb2.GroupCancellation]) -> None:
        for cancellation in cancellations:
            key = (cancellation.group.group_id, cancellation.group.attempt)
            running = self._running.get(key)
            if running is None:  # ended before, or never heard of: nothing of it is in an engine
                if key not in self._acknowledged:
                    self._acknowledged.append(key)
            elif not running.cancelled:
                running.cancelled = True
                log.info("group_cancelled", group_id=key[0], attempt=key[1], reason=cancellation.reason)
                if running.task is not None:
                    running.task.cancel()

    async def report_loop(self) -> None:
        while True:
            reports = [await self._reports.get()]
            await asyncio.sleep(self._report_period_s)
            size_bytes = reports[0].ByteSize()
            while not self._reports.empty() and len(reports) < MAX_REPORTS_PER_CALL and size_bytes < MAX_REPORT_BYTES:
                reports.append(self._reports.get_nowait())
                size_bytes += reports[-1].ByteSize()
            await self._report(reports)
            self._unreported -= len(reports)
            self._check_idle()

    async def _report(self, reports: list[runner_pb2.GroupReport]) -> None:
        request = runner_pb2.ReportGroupsRequest(
            request_id=str(uuid4()), runner_id=self._runner_id, runner_epoch=self._epoch, reports=reports
        )
        while True:
            try:
                response = await self._peers.orchestrator.ReportGroups(request, timeout=CALL_SLACK_S)
            except grpc.aio.AioRpcError as error:
                await self._retry_or_raise(error, "report")
                continue
            break
        by_key = {(report.group.group_id, report.group.attempt): report for report in reports}
        for attempt in (*response.refused, *response.unneeded):
            report = by_key.get((attempt.group_id, attempt.attempt))
            if report is not None:
                self._drop(report)

    async def _retry_or_raise(self, error: grpc.aio.AioRpcError, what: str) -> None:
        """An orchestrator that is away comes back; one that will always refuse ends this runner."""
        rebuilt = from_rpc_error(error)
        if isinstance(rebuilt, FINAL):
            raise rebuilt from error
        if isinstance(rebuilt, Unreachable):
            self._outage.failed(rebuilt.message)
        else:
            log.warning("orchestrator_call_failed", call=what, reason=rebuilt.reason, detail=rebuilt.message)
        if self.draining and isinstance(rebuilt, Draining | Unreachable):
            self._idle.set()
        await asyncio.sleep(RETRY_S)

    async def drain(self) -> None:
        """Take no more groups and wait until what runs is reported. The caller bounds the time.

        Where the orchestrator stops, too, or is away, nobody would take a report: what runs is left in the spool.
        Sessions last as long as their agents like: they are left to the next process of this runner, if it comes within
        the lease's time; otherwise the orchestrator takes them for lost.
        """
        self.draining = True
        self._sessions.leave()
        for running in self._running.values():
            if running.assignment.HasField("session_group") and running.task is not None and not running.cancelled:
                running.left = True
                running.task.cancel()
        self._check_idle()
        await self._idle.wait()
