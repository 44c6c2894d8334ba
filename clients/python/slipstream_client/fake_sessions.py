"""Sessions of the fake server: opened, found in pages, closed; a group whose members are all closed is trained on.

No model answers for them: point `gateway_url` at a server of your own, or leave it and never ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_urlsafe

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream_client.errors import InvalidRequest, RequestIdReused, SessionUnknown

OPEN, CLOSED, TRAINED, ENDED = (
    rollout_pb2.SESSION_STATE_OPEN,
    rollout_pb2.SESSION_STATE_CLOSED,
    rollout_pb2.SESSION_STATE_TRAINED,
    rollout_pb2.SESSION_STATE_ENDED,
)
GROUP_SIZE = 4
"""Of a run that says nothing else."""
HOUR_MS = 3_600_000


class FakeSessions:
    """Not safe for several threads by itself: its server holds a lock."""

    def __init__(self, gateway_url: str) -> None:
        self._gateway_url = gateway_url
        self._sessions: dict[str, rollout_pb2.Session] = {}
        self._answered: dict[str, tuple[bytes, rollout_pb2.OpenSessionResponse]] = {}
        self._joinable: dict[str, int] = {}
        """Position of a key's group that has places left."""
        self._position = self._step = 0

    def open(self, request: rollout_pb2.OpenSessionRequest) -> rollout_pb2.OpenSessionResponse:
        """A session in the next place of its key's group."""
        body = request.SerializeToString(deterministic=True)
        first = self._answered.get(request.request_id)
        if first is not None and first[0] != body:
            raise RequestIdReused("this request_id came with another body before")
        if first is None:
            first = self._answered[request.request_id] = (body, self._opened(request))
        return first[1]

    def _opened(self, request: rollout_pb2.OpenSessionRequest) -> rollout_pb2.OpenSessionResponse:
        position = self._joinable.get(request.group_key)
        members = [] if position is None else self._members(position)
        size = members[0].group_size if members else request.group_size or (GROUP_SIZE if request.group_key else 1)
        if request.group_size not in (0, size):
            message = f"group_size: the group of this key that has a place left was begun with {size} members"
            raise InvalidRequest(message, metadata={"field": "group_size", "limit": str(size)})
        if position is None:
            position, self._position = self._position, self._position + 1
        session = rollout_pb2.Session(
            session_id=f"session-{position}-{len(members)}",
            state=OPEN,
            group_key=request.group_key,
            group_size=size,
            sample_index=len(members),
            position=position,
            dispatch_version=types_pb2.PolicyVersion(incarnation=1, step=self._step),
            labels=request.labels,
            base_url=self._gateway_url,
            idle_timeout_ms=request.idle_timeout_ms or HOUR_MS,
            total_timeout_ms=request.total_timeout_ms or HOUR_MS,
        )
        self._sessions[session.session_id] = session
        if len(members) + 1 < size:
            self._joinable[request.group_key] = position
        else:
            self._joinable.pop(request.group_key, None)
        return rollout_pb2.OpenSessionResponse(session_id=session.session_id, key=token_urlsafe(32), session=session)

    def get(self, session_id: str) -> rollout_pb2.Session:
        """A session as it is now."""
        if session_id not in self._sessions:
            raise SessionUnknown(f"session {session_id!r} is not known", metadata={"session_id": session_id})
        return self._sessions[session_id]

    def page(self, token: str, size: int, labels: Mapping[str, str]) -> tuple[list[rollout_pb2.Session], str]:
        """Sessions in the order in which they were opened, and where the next page begins."""
        found = [
            (number, session)
            for number, session in enumerate(self._sessions.values())
            if number >= int(token or 0) and all(session.labels.get(name) == value for name, value in labels.items())
        ]
        return [session for _, session in found[:size]], str(found[size][0]) if len(found) > size else ""

    def close(self, request: rollout_pb2.CloseSessionRequest) -> rollout_pb2.Session:
        """Take its reward; the last of its group has a step trained on those that are closed."""
        session = self.get(request.session_id)
        if session.state != OPEN:
            return session
        if request.discard:
            return self.end(session.session_id, "DISCARDED")
        if session.group_size < 2 and not request.HasField("advantage"):
            message = "a group of 1 has no advantages of its own, which takes 2 members: give one"
            raise InvalidRequest(message, metadata={"field": "advantage", "limit": "2"})
        session.state, session.reward = CLOSED, request.reward
        self._settle(session.position)
        return session

    def end(self, session_id: str, reason: str) -> rollout_pb2.Session:
        """End a session untrained, as a timeout does."""
        session = self.get(session_id)
        if session.state in (OPEN, CLOSED):
            session.state, session.reason = ENDED, reason
            self._settle(session.position)
        return session

    def end_all(self, reason: str) -> None:
        """The run is over."""
        for session in self._sessions.values():
            if session.state in (OPEN, CLOSED):
                session.state, session.reason = ENDED, reason

    def _members(self, position: int) -> list[rollout_pb2.Session]:
        return [session for session in self._sessions.values() if session.position == position]

    def _settle(self, position: int) -> None:
        members = self._members(position)
        closed = [session for session in members if session.state == CLOSED]
        if len(members) < members[0].group_size or any(session.state == OPEN for session in members) or not closed:
            return
        self._step += 1
        for session in closed:
            session.state, session.step = TRAINED, self._step
