"""Opening and closing sessions: what takes waiting, or a call to their runner."""

from __future__ import annotations

from uuid import uuid4

from slipstream.api.rollout.v1 import rollout_pb2, session_pb2, session_pb2_grpc
from slipstream.common.channels import Channels
from slipstream.common.errors import (
    GatewayAbsent,
    InvalidRequest,
    SamplingBiased,
    SessionEnded,
    SessionKeyLost,
    SessionsFull,
    SessionUnknown,
    Unreachable,
    rpc_errors,
)
from slipstream.orchestrator.ledger import asked_by
from slipstream.orchestrator.run_state import RunState
from slipstream.orchestrator.sequencer import Sequencer
from slipstream.orchestrator.session_keys import SessionKeys, sha256
from slipstream.orchestrator.sessions import OPEN, AgentSession

_END_TIMEOUT_S = 10.0


class SessionDesk:
    """Opens and closes sessions. A key is told to whoever opened its session; what is kept of it is its hash."""

    def __init__(
        self, state: RunState, sequencer: Sequencer, channels: Channels, keys: SessionKeys | None = None
    ) -> None:
        """`keys`: None where the run has no gateway."""
        self._keys = keys
        self._state = state
        self._sequencer = sequencer
        self._sessions = sequencer.sessions
        self._channels = channels

    async def open(self, request: rollout_pb2.OpenSessionRequest) -> rollout_pb2.OpenSessionResponse:
        """Wait for a slot and a runner. What was opened by this request before is answered as it is now."""
        known = self._sessions.ledger.asked(asked_by(request))
        if known is not None and self._keys is not None:
            key = self._keys.key(known.nonce)
            if sha256(key) != known.key_sha256:
                raise SessionKeyLost(
                    f"session {known.proto.session_id} was opened by this request, and its key cannot be told again: "
                    f"{self._keys.path} is not the secret that it was made from; put that back and restart, or open "
                    "another by a new request_id",
                    path=self._keys.path,
                    session_id=known.proto.session_id,
                )
            return _answer(known, key)
        self._state.refuse_ended("it takes no more sessions")
        if self._keys is None:
            raise GatewayAbsent("this run has no gateway: start it with gateway.enabled = true")
        if request.HasField("sampling"):
            _check_sampling(request)
        nonce = self._keys.nonce()
        key = self._keys.key(nonce)
        opening = self._sessions.open(request, sha256(key), nonce)
        self._sequencer.admission_may_have_opened()
        try:
            await self._sessions.changed.until(
                lambda: opening.session is not None or self._state.ended, request.wait_ms / 1000
            )
        finally:
            if opening.session is None:
                self._sessions.withdraw(opening)
        if opening.session is None:
            self._state.refuse_ended("it takes no more sessions")
            raise SessionsFull(
                f"no admission slot, or no runner, came in the time given, in phase {self._state.phase.value}",
                limit=self._sessions.config.max_open,
            )
        return _answer(opening.session, key)

    async def close(self, request: rollout_pb2.CloseSessionRequest) -> rollout_pb2.CloseSessionResponse:
        """Tell its runner."""
        session = self._sessions.get(request.session_id)
        if session.proto.state == OPEN:
            await self._close(session, request)
        return rollout_pb2.CloseSessionResponse(session=session.proto)

    async def _close(self, session: AgentSession, request: rollout_pb2.CloseSessionRequest) -> None:
        least = self._sequencer.config.min_group_size
        if session.group.size < least and not request.discard and not request.HasField("advantage"):
            raise InvalidRequest(
                f"a group of {session.group.size} has no advantages of its own, which takes {least} members: give one",
                field="advantage",
                limit=least,
            )
        end = session_pb2.EndSessionRequest(
            request_id=uuid4().hex,
            session_id=request.session_id,
            reward=request.reward,
            advantage=request.advantage if request.HasField("advantage") else None,
            discard=request.discard,
        )
        stub = session_pb2_grpc.SessionServiceStub(self._channels.get(session.group.address))
        try:
            with rpc_errors():
                await stub.EndSession(end, timeout=_END_TIMEOUT_S)
        except SessionEnded as error:
            self._sessions.ended(session, error.metadata["session_reason"])
        except SessionUnknown as error:  # it will be there, or its runner says that it is lost
            address = session.group.address
            raise Unreachable(
                "the session's runner was started again, and is yet to take it up", address=address
            ) from error
        else:
            if request.discard:
                self._sessions.ended(session, "DISCARDED")
            else:
                self._sessions.closed(session, request.reward)

    async def close_channels(self) -> None:
        """Close the channels to runners."""
        await self._channels.close()


def _answer(session: AgentSession, key: str) -> rollout_pb2.OpenSessionResponse:
    return rollout_pb2.OpenSessionResponse(
        session_id=session.proto.session_id, address=session.group.address, key=key, session=session.proto
    )


def _check_sampling(request: rollout_pb2.OpenSessionRequest) -> None:
    sampling = request.sampling
    if not sampling.temperature:
        raise SamplingBiased("greedy tokens teach nothing: a session takes a temperature", field="temperature")
    for field, value in (("top_p", sampling.top_p % 1), ("top_k", sampling.top_k), ("min_p", sampling.min_p)):
        if value:
            raise SamplingBiased(f"{field} cuts tokens off, which training must not", field=field)
