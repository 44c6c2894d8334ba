"""RunService and RolloutService: what the launcher and third parties call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.common.errors import EnvironmentUnknown, InvalidRequest
from slipstream.common.handlers import ends_on_drain
from slipstream.common.idempotency import RequestMemory
from slipstream.orchestrator.checkpoint_calls import MAX_WAIT_S, CheckpointCalls
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.run_state import CLIENT, RunState
from slipstream.orchestrator.sequencer import Sequencer
from slipstream.orchestrator.session_desk import SessionDesk
from slipstream.orchestrator.tasks import group_id_of

_DEFAULT_PAGE = 100
_DEFAULT_PER_SECOND = 2
_PAUSING = "it can neither pause nor go on"


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """Shows the run and lets it be paused and stopped."""

    def __init__(
        self,
        state: RunState,
        sequencer: Sequencer,
        checkpoints: CheckpointCalls,
        journal: Journal,
        end: Callable[[run_pb2.RunState, str], None],
    ) -> None:
        self._state = state
        self._sequencer = sequencer
        self._checkpoints = checkpoints
        self._journal = journal
        self._end = end

    async def GetRun(self, request: run_pb2.GetRunRequest, context: grpc.aio.ServicerContext) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(run=self._state.to_proto())

    async def WatchRun(
        self, request: run_pb2.WatchRunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        pause_s = 1.0 / (request.max_per_second or _DEFAULT_PER_SECOND)
        while True:
            ended = self._state.ended
            yield run_pb2.WatchRunResponse(run=self._state.to_proto())
            if ended:
                return
            # Changes during the pause would wake nobody; so at most a second passes without a message.
            await asyncio.sleep(pause_s)
            await self._state.changed.wait(max(0.0, 1.0 - pause_s))

    async def PauseRun(
        self, request: run_pb2.PauseRunRequest, context: grpc.aio.ServicerContext
    ) -> run_pb2.PauseRunResponse:
        self._state.refuse_ended(_PAUSING)
        if CLIENT not in self._state.pauses:
            reason = request.reason or "paused by PauseRun"
            self._journal.append("paused", reason=reason)
            self._state.pause(CLIENT, reason)
        await self._journal.settle()
        return run_pb2.PauseRunResponse(run=self._state.to_proto())

    async def ResumeRun(
        self, request: run_pb2.ResumeRunRequest, context: grpc.aio.ServicerContext
    ) -> run_pb2.ResumeRunResponse:
        self._state.refuse_ended(_PAUSING)
        if CLIENT in self._state.pauses:
            self._journal.append("unpaused")
            self._state.resume(CLIENT)
            self._sequencer.admission_may_have_opened()
        await self._journal.settle()
        return run_pb2.ResumeRunResponse(run=self._state.to_proto())

    async def StopRun(
        self, request: run_pb2.StopRunRequest, context: grpc.aio.ServicerContext
    ) -> run_pb2.StopRunResponse:
        self._end(run_pb2.RUN_STATE_STOPPED, request.reason or "stopped by StopRun")
        await self._journal.settle()
        return run_pb2.StopRunResponse(run=self._state.to_proto())

    @ends_on_drain
    async def SaveCheckpoint(
        self, request: run_pb2.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> run_pb2.SaveCheckpointResponse:
        left_s: float | None = context.time_remaining()
        timeout_s = MAX_WAIT_S if left_s is None else left_s
        version = await self._checkpoints.wait(self._sequencer.machine.trained_step, timeout_s)
        return run_pb2.SaveCheckpointResponse(version=version.to_proto())


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Lets third parties ask for rollouts beside the training sequence."""

    def __init__(self, state: RunState, sequencer: Sequencer, desk: SessionDesk, journal: Journal) -> None:
        self._journal = journal
        self._state = state
        self._sequencer = sequencer
        self._desk = desk
        self._groups = sequencer.external
        self._answers = RequestMemory()

    async def CreateRollout(
        self, request: rollout_pb2.CreateRolloutRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.CreateRolloutResponse:
        answer = await self._answers.once(request, lambda: self._create(request))
        await self._journal.settle()  # beyond `once`: a call that is cut off here has made its group
        return answer

    async def _create(self, request: rollout_pb2.CreateRolloutRequest) -> rollout_pb2.CreateRolloutResponse:
        self._state.refuse_ended("it takes no more rollouts")
        name, known = request.task.environment, self._sequencer.environments
        if request.HasField("task") and name not in known:
            raise EnvironmentUnknown(f"no environment is called {name!r}", known=", ".join(known))
        self._journal.check_room(self._sequencer.config.journal_buffer_bytes)
        group = self._groups.create(request)
        self._sequencer.admission_may_have_opened()
        return rollout_pb2.CreateRolloutResponse(rollout=group.rollout)

    async def GetRollout(
        self, request: rollout_pb2.GetRolloutRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetRolloutResponse:
        return rollout_pb2.GetRolloutResponse(rollout=self._groups.get(request.group_id).rollout)

    async def ListRollouts(
        self, request: rollout_pb2.ListRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ListRolloutsResponse:
        groups, more = self._groups.ledger.page(
            _page_start(request.page_token), request.page_size or _DEFAULT_PAGE, request.filter.labels
        )
        return rollout_pb2.ListRolloutsResponse(
            rollouts=[group.rollout for group in groups], next_page_token=str(groups[-1].number) if more else ""
        )

    async def WatchRollouts(
        self, request: rollout_pb2.WatchRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.WatchRolloutsResponse]:
        sequence, labels = request.after_sequence, request.filter.labels
        if sequence > self._groups.sequence:
            raise InvalidRequest(
                f"after_sequence: the newest is {self._groups.sequence}",
                field="after_sequence",
                limit=self._groups.sequence,
            )
        one = self._groups.get(request.group_id) if request.group_id else None
        while True:
            if one is None:
                sequence, group = self._groups.next_change(sequence, labels)
            else:
                group = one if one.sequence > sequence else None
            if group is not None:
                sequence = group.sequence
                yield rollout_pb2.WatchRolloutsResponse(rollout=group.rollout)
            elif self._state.ended or (one is not None and one.ended):
                return
            else:
                await self._groups.changed.wait(5.0)

    async def CancelRollout(
        self, request: rollout_pb2.CancelRolloutRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.CancelRolloutResponse:
        self._sequencer.cancel_external(request.group_id)
        await self._journal.settle()
        return rollout_pb2.CancelRolloutResponse(rollout=self._groups.get(request.group_id).rollout)

    @ends_on_drain
    async def OpenSession(
        self, request: rollout_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.OpenSessionResponse:
        self._journal.check_room(self._sequencer.config.journal_buffer_bytes)
        answer = await self._answers.once(request, lambda: self._desk.open(request))
        await self._journal.settle()
        return answer

    async def GetSession(
        self, request: rollout_pb2.GetSessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetSessionResponse:
        return rollout_pb2.GetSessionResponse(session=self._sequencer.sessions.get(request.session_id).proto)

    async def ListSessions(
        self, request: rollout_pb2.ListSessionsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ListSessionsResponse:
        sessions, more = self._sequencer.sessions.ledger.page(
            _page_start(request.page_token), request.page_size or _DEFAULT_PAGE, request.filter.labels
        )
        return rollout_pb2.ListSessionsResponse(
            sessions=[session.proto for session in sessions], next_page_token=str(sessions[-1].number) if more else ""
        )

    async def FindSession(
        self, request: rollout_pb2.FindSessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.FindSessionResponse:
        session = self._sequencer.sessions.find(request.key_sha256)
        group = session.group
        return rollout_pb2.FindSessionResponse(
            session=session.proto,
            address=group.address,
            group_id=group_id_of(group.position),
            attempt=group.attempt,
        )

    async def CloseSession(
        self, request: rollout_pb2.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.CloseSessionResponse:
        answer = await self._answers.once(request, lambda: self._desk.close(request))
        await self._journal.settle()
        return answer


def _page_start(token: str) -> int:
    if token and not token.isdecimal():
        raise InvalidRequest("this page token was not given out", field="page_token")
    return int(token or 0)
