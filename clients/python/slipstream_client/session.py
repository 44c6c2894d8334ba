"""Sessions as plain values: turns that an agent of your own drives, whose trajectory trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream_client.rollout import Version, version_of


class SessionState(StrEnum):
    """Where a session stands."""

    OPEN = "open"
    CLOSED = "closed"
    """It has its reward, and waits for the rest of its group, or for its place in a step."""
    TRAINED = "trained"
    ENDED = "ended"
    """Without being trained on; `reason` says why."""
    UNKNOWN = "unknown"
    """A state of a newer server."""


@dataclass(frozen=True)
class Session:
    """A session, as it was when it was sent."""

    session_id: str
    state: SessionState
    reason: str
    """Why it ended untrained, for programs: "IDLE_TIMEOUT", "AGED_OUT", "NO_VARIANCE" ..."""
    base_url: str
    """Of an OpenAI client."""
    key: str = field(repr=False)
    """The client's `api_key`. Only `open_session` is told it; empty elsewhere."""
    group_key: str
    group_size: int
    position: int
    """The position of the task sequence that its group takes."""
    dispatch_version: Version
    """The weights served when its group was dispatched."""
    reward: float | None
    step: int | None
    """The step that trained on it."""
    labels: dict[str, str]
    idle_timeout_s: float
    total_timeout_s: float
    trace_id: str = ""
    """Its trace at the run's collector and in `slipstream trace`; empty where it is not traced."""

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.state in (SessionState.TRAINED, SessionState.ENDED)

    @classmethod
    def from_proto(cls, proto: rollout_pb2.Session, key: str = "") -> Session:
        return cls(
            session_id=proto.session_id,
            state=_STATES.get(proto.state, SessionState.UNKNOWN),
            reason=proto.reason,
            base_url=proto.base_url,
            key=key,
            group_key=proto.group_key,
            group_size=proto.group_size,
            position=proto.position,
            dispatch_version=version_of(proto.dispatch_version),
            reward=proto.reward if proto.HasField("reward") else None,
            step=proto.step if proto.HasField("step") else None,
            labels=dict(proto.labels),
            idle_timeout_s=proto.idle_timeout_ms / 1000,
            total_timeout_s=proto.total_timeout_ms / 1000,
            trace_id=proto.trace_id,
        )


_STATES = {
    rollout_pb2.SESSION_STATE_OPEN: SessionState.OPEN,
    rollout_pb2.SESSION_STATE_CLOSED: SessionState.CLOSED,
    rollout_pb2.SESSION_STATE_TRAINED: SessionState.TRAINED,
    rollout_pb2.SESSION_STATE_ENDED: SessionState.ENDED,
}
