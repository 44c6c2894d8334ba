"""SessionService: RPC to domain and back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from slipstream.api.rollout.v1 import session_pb2, session_pb2_grpc
from slipstream.runner.sessions import SessionRunner


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Runs turns of sessions, and ends them."""

    def __init__(self, sessions: SessionRunner) -> None:
        self._sessions = sessions

    async def RunTurn(
        self, request: session_pb2.RunTurnRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[session_pb2.RunTurnResponse]:
        group, member = await self._sessions.find(request.session_id)
        turn = group.begin(member, request)
        try:
            async for piece in turn.pieces():
                yield piece
        finally:
            turn.abandon()

    async def EndSession(
        self, request: session_pb2.EndSessionRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.EndSessionResponse:
        group, member = await self._sessions.find(request.session_id)
        await group.end(member, request)
        return session_pb2.EndSessionResponse()
