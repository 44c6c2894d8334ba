"""From a key to its session, and from a request to a turn at the session's runner."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from uuid import uuid4

import grpc

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, session_pb2, session_pb2_grpc
from slipstream.common.channels import Channels
from slipstream.common.errors import SessionEnded, SessionUnknown, Unreachable, rpc_errors

FIND_TIMEOUT_S = 10.0
OPEN = rollout_pb2.SESSION_STATE_OPEN


class Turns:
    """Calls behind the gateway. Without state: whoever has a key goes on after a restart of it."""

    def __init__(self, orchestrator: grpc.aio.Channel, channels: Channels, turn_timeout_s: float) -> None:
        self._rollouts = rollout_pb2_grpc.RolloutServiceStub(orchestrator)
        self._channels = channels
        self._turn_timeout_s = turn_timeout_s

    async def find(self, key: str) -> rollout_pb2.FindSessionResponse:
        """The open session of a key. Raises `SessionUnknown`, and `SessionEnded` with the reason."""
        digest = hashlib.sha256(key.encode()).digest()
        with rpc_errors():
            found = await self._rollouts.FindSession(
                rollout_pb2.FindSessionRequest(key_sha256=digest), timeout=FIND_TIMEOUT_S
            )
        if found.session.state != OPEN:
            state = rollout_pb2.SessionState.Name(found.session.state).removeprefix("SESSION_STATE_")
            reason = found.session.reason or state
            raise SessionEnded(f"the session has ended: {reason}", session_reason=reason)
        return found

    async def run(
        self, address: str, turn: session_pb2.RunTurnRequest
    ) -> AsyncGenerator[session_pb2.RunTurnResponse, None]:
        """The pieces of a turn's answer. Closing the iterator aborts the turn. Raises `SlipstreamError`."""
        turn.request_id = uuid4().hex
        stub = session_pb2_grpc.SessionServiceStub(self._channels.get(address))
        stream = stub.RunTurn(turn, timeout=self._turn_timeout_s)
        try:
            with rpc_errors():
                async for piece in stream:
                    yield piece
        except SessionUnknown as error:  # the key has a session: its runner was started again
            raise Unreachable("the session's runner was started again", address=address) from error
        finally:
            stream.cancel()
