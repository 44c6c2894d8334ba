"""RunnerService and BatchService: what runners and the trainer's ranks call."""

from __future__ import annotations

import asyncio
import uuid

import grpc

from slipstream.api.rollout.v1 import runner_pb2, runner_pb2_grpc
from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc
from slipstream.common.errors import IncarnationSuperseded, InvalidRequest, StepNotNext, StepNotSealed
from slipstream.common.handlers import ends_on_drain
from slipstream.common.idempotency import RequestMemory
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.checkpoint_calls import CheckpointCalls
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.leases import AttemptKey, Runner
from slipstream.orchestrator.run_state import RunPhase, RunState
from slipstream.orchestrator.sequencer import Sequencer

# An open cancellation is repeated this often.
_REPEAT_S = 0.2
# Restarts of the trainer that may have died before they asked for a plan.
_RESTORES = 16


class RunnerServicer(runner_pb2_grpc.RunnerServiceServicer):
    """Hands groups to runners and takes their reports."""

    def __init__(self, sequencer: Sequencer, state: RunState, journal: Journal) -> None:
        self._sequencer = sequencer
        self._state = state
        self._journal = journal
        self._answers = RequestMemory()
        self._epoch = uuid.uuid4().hex

    @ends_on_drain
    async def AcquireGroups(
        self, request: runner_pb2.AcquireGroupsRequest, context: grpc.aio.ServicerContext
    ) -> runner_pb2.AcquireGroupsResponse:
        answer = await self._answers.once(request, lambda: self._acquire(request))
        if answer.groups:  # engines keep what they compute under these names: none must be given out twice
            await (
                self._journal.settle()
            )  # beyond `once`: a call that is cut off here is answered the same when repeated
        return answer

    async def _acquire(self, request: runner_pb2.AcquireGroupsRequest) -> runner_pb2.AcquireGroupsResponse:
        sequencer = self._sequencer
        runner = self._renew(request.runner_id, request.runner_epoch)
        await sequencer.admission_changed.until(
            lambda: (sequencer.available and not runner.spool_full) or self._state.ended, request.wait_ms / 1000
        )
        # Others may have taken over, or the lease may have run out, while this call waited.
        runner = self._renew(request.runner_id, request.runner_epoch)
        runner.address = request.address
        return runner_pb2.AcquireGroupsResponse(
            groups=sequencer.acquire(runner, request.max_groups),
            lease_ttl_ms=self._ttl_ms,
            run_ended=self._state.ended,
        )

    @ends_on_drain
    async def Heartbeat(
        self, request: runner_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> runner_pb2.HeartbeatResponse:
        leases = self._sequencer.leases
        runner = self._renew(request.runner_id, request.runner_epoch)
        full = bool(request.spool_limit_bytes) and request.spool_bytes >= request.spool_limit_bytes
        if runner.spool_full != full:
            runner.spool_full = full
            self._sequencer.admission_may_have_opened()
        runner.disk_full = request.disk_full
        self._sequencer.sessions.heard((ended.session_id, ended.reason) for ended in request.ended_sessions)
        leases.acknowledge(runner, [_key(attempt) for attempt in request.acknowledged])
        running = [_key(attempt) for attempt in request.running]
        leases.claim(runner, running)
        if runner.orphans and request.reported_to_epoch == self._epoch:
            self._sequencer.lose(leases.unclaimed(runner))
        for key in running:
            # What it runs without a lease was given to another or never known: it must stop.
            if key not in runner.attempts and not self._sequencer.reported_lately(key):
                runner.cancellations.setdefault(key, "SUPERSEDED")
        wait_s = request.wait_ms / 1000
        if runner.told >= runner.cancellations.keys():
            # What is repeated is no news: without a pause the runner would ask again at once, and again.
            wait_s = min(wait_s, _REPEAT_S) if runner.cancellations else wait_s
            if wait_s:
                await runner.wake.wait(wait_s)
                runner = self._renew(request.runner_id, request.runner_epoch)
        runner.told = set(runner.cancellations)
        return runner_pb2.HeartbeatResponse(
            cancellations=[
                runner_pb2.GroupCancellation(
                    group=runner_pb2.GroupAttempt(group_id=key[0], attempt=key[1]), reason=reason
                )
                for key, reason in runner.cancellations.items()
            ],
            lease_ttl_ms=self._ttl_ms,
            orchestrator_epoch=self._epoch,
        )

    async def ReportGroups(
        self, request: runner_pb2.ReportGroupsRequest, context: grpc.aio.ServicerContext
    ) -> runner_pb2.ReportGroupsResponse:
        return await self._answers.once(request, lambda: self._report(request))

    async def _report(self, request: runner_pb2.ReportGroupsRequest) -> runner_pb2.ReportGroupsResponse:
        runner = self._renew(request.runner_id, request.runner_epoch)
        self._journal.check_room(self._sequencer.config.journal_buffer_bytes)
        result = self._sequencer.report(runner, request.reports)
        return runner_pb2.ReportGroupsResponse(
            refused=[_attempt(key) for key in result.refused], unneeded=[_attempt(key) for key in result.unneeded]
        )

    def _renew(self, runner_id: str, epoch: str) -> Runner:
        return self._sequencer.leases.renew(runner_id, epoch)

    @property
    def _ttl_ms(self) -> int:
        return int(self._sequencer.leases.ttl_s * 1000)


class BatchServicer(batch_pb2_grpc.BatchServiceServicer):
    """Gives sealed plans to the trainer and takes what it trained."""

    def __init__(self, sequencer: Sequencer, state: RunState, journal: Journal, checkpoints: CheckpointCalls) -> None:
        self._checkpoints = checkpoints
        self._sequencer = sequencer
        self._state = state
        self._journal = journal

    @ends_on_drain
    async def GetPlan(
        self, request: batch_pb2.GetPlanRequest, context: grpc.aio.ServicerContext
    ) -> batch_pb2.GetPlanResponse:
        sequencer, step = self._sequencer, request.step
        self._check_incarnation(request.incarnation)
        if request.rank >= sequencer.config.data_ranks:
            raise InvalidRequest("no such rank", field="rank", limit=sequencer.config.data_ranks - 1)
        if request.incarnation > sequencer.incarnation:  # only here, where a restored trainer begins
            if step <= sequencer.released_step:
                raise StepNotNext(
                    f"the rows of step {step} are gone: restored too early", next_step=sequencer.released_step + 1
                )
            if step > sequencer.machine.sealed_step + 1:
                raise StepNotNext(f"step {step - 1} was never sealed", next_step=sequencer.machine.sealed_step + 1)
            sequencer.restored(request.incarnation, step - 1)
        if step > sequencer.machine.last_step:
            return batch_pb2.GetPlanResponse(ended=batch_pb2.PlanEnded(reason="all steps are trained"))
        next_step = sequencer.machine.sealed_step + 1
        if step not in sequencer.plans and step != next_step:
            raise StepNotNext(f"step {step} is not the next to be sealed", next_step=next_step)
        checkpoint_step = request.checkpoint_step if request.HasField("checkpoint_step") else None
        sequencer.checkpointed(checkpoint_step)
        self._checkpoints.heard(request.incarnation, checkpoint_step)
        sequencer.want(step)
        await sequencer.sealed.until(lambda: step in sequencer.plans or self._state.ended, request.wait_ms / 1000)
        self._check_incarnation(request.incarnation)
        plan = sequencer.plans.get(step)
        if self._state.ended:
            return batch_pb2.GetPlanResponse(ended=batch_pb2.PlanEnded(reason=self._state.reason))
        if plan is None:
            return batch_pb2.GetPlanResponse(
                pending=batch_pb2.PlanPending(
                    ready_group_count=sequencer.ready_groups,
                    needed_group_count=sequencer.config.groups_per_step,
                    checkpoint_due=sequencer.checkpoint_due,
                ),
                checkpoint_asked=self._checkpoints.due,
            )
        # A plan must outlive this machine before anyone acts on it.
        await asyncio.shield(self._journal.sync())
        answer = batch_pb2.GetPlanResponse(plan=plan.plans[request.rank], checkpoint_asked=self._checkpoints.due)
        answer.plan.version.incarnation = request.incarnation
        return answer

    async def ReportStep(
        self, request: batch_pb2.ReportStepRequest, context: grpc.aio.ServicerContext
    ) -> batch_pb2.ReportStepResponse:
        version = PolicyVersion.from_proto(request.version)
        self._check_incarnation(version.incarnation)
        machine = self._sequencer.machine
        # A restored trainer may be ahead: reports of steps before its checkpoint may have died with the one before it.
        restored = version.incarnation > self._sequencer.incarnation
        if version.step > (machine.sealed_step if restored else min(machine.sealed_step, machine.trained_step + 1)):
            raise StepNotSealed(f"step {version.step} was not given out", sealed_step=machine.sealed_step)
        step_s = max(0, request.finished_unix_ms - request.started_unix_ms) / 1000
        figures = dict(request.metrics)
        if "wait_s" in figures:
            started_s = request.started_unix_ms / 1000
            figures["wait_s"] = self._state.wait_in_training_s(figures["wait_s"], started_s)
        self._sequencer.trained(version, figures, step_s, skipped=request.skipped)
        await self._journal.settle()  # the trainer will not report it again
        return batch_pb2.ReportStepResponse(ended=self._state.ended or version.step >= machine.last_step)

    async def ReportActivity(
        self, request: batch_pb2.ReportActivityRequest, context: grpc.aio.ServicerContext
    ) -> batch_pb2.ReportActivityResponse:
        self._state.trainer_activity = request.activity
        self._state.changed.notify()
        if not self._state.serving:
            if request.activity == "sft":
                self._state.enter(RunPhase.WARM_UP)
            self._state.progress(request.fraction_done, **dict(request.metrics))
        return batch_pb2.ReportActivityResponse()

    def _check_incarnation(self, incarnation: int) -> None:
        """A restore opens the next incarnation, not any: a wild number must not shut the trainer out.

        A few are let go by: each restart takes one, and may die before it asks.
        """
        current = self._sequencer.incarnation
        if incarnation < current:
            raise IncarnationSuperseded("a later restore took over", incarnation=current)
        if incarnation > current + _RESTORES and self._sequencer.machine.sealed_step:
            raise InvalidRequest(f"incarnation {current} goes on", field="incarnation", limit=current + _RESTORES)


def _key(attempt: runner_pb2.GroupAttempt) -> AttemptKey:
    return attempt.group_id, attempt.attempt


def _attempt(key: AttemptKey) -> runner_pb2.GroupAttempt:
    return runner_pb2.GroupAttempt(group_id=key[0], attempt=key[1])
