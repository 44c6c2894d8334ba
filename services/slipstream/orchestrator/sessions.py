"""Sessions that outside agents drive: which group each belongs to, who runs it, and what became of it.

A group of sessions is a position of the task sequence, dispatched, leased, aged out, sealed and trained as every other;
its members are sessions instead of rollouts of the position's task. So the staleness machine and the journal need to
know nothing of them. Where the attempt is lost or too old, its sessions end, and the position's next attempt is an
ordinary one, or another group of sessions.

Only hashes of keys are kept. Each change of a session is in the journal, so that a restarted orchestrator knows those
of the one before it; their turns are at their runners, which go on meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common import tracing
from slipstream.common.errors import InvalidRequest, SessionsFull, SessionUnknown
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator import telemetry
from slipstream.orchestrator.config import SESSION, SessionsConfig
from slipstream.orchestrator.ledger import Asked, Ledger, asked_by
from slipstream.orchestrator.line import Line
from slipstream.orchestrator.session_history import OVER, KeptSession
from slipstream.orchestrator.signals import Signal
from slipstream.orchestrator.tasks import group_id_of

OPEN = rollout_pb2.SESSION_STATE_OPEN
CLOSED = rollout_pb2.SESSION_STATE_CLOSED
TRAINED = rollout_pb2.SESSION_STATE_TRAINED
ENDED = rollout_pb2.SESSION_STATE_ENDED
LOST = "RUNNER_LOST"
LATE = "TIMED_OUT"
"""Of a session whose group was reported before the runner said why the session had ended."""


@dataclass(slots=True)
class SessionGroup:
    """The sessions of one attempt at a position."""

    name: str
    request: rollout_pb2.OpenSessionRequest
    """Of its first member: timeouts and sampling are those of all."""
    size: int
    idle_timeout_ms: int
    total_timeout_ms: int
    openings: list[Opening] = field(default_factory=list["Opening"])
    """Those who wait for a runner."""
    sessions: dict[int, AgentSession] = field(default_factory=dict[int, "AgentSession"])
    given_up: set[int] = field(default_factory=set[int])
    """Places that nobody took in time."""
    address: str = ""
    """Of its runner, once there is one."""
    position: int = -1
    attempt: int = 0
    version: PolicyVersion = UNSET

    kind = SESSION
    trains = True

    @property
    def rollout_count(self) -> int:
        """Its members."""
        return self.size

    @property
    def free_places(self) -> int:
        """How many may still join."""
        return self.size - len(self.openings) - len(self.sessions.keys() | self.given_up)


@dataclass(slots=True)
class AgentSession:
    """One session."""

    proto: rollout_pb2.Session
    group: SessionGroup
    key_sha256: bytes
    number: int
    asked: Asked
    nonce: bytes

    @property
    def over(self) -> bool:
        """Whether it changes no more."""
        return self.proto.state in OVER

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return self.proto.session_id

    @property
    def labels(self) -> Mapping[str, str]:
        """Its opener's own marks."""
        return self.proto.labels

    @property
    def size_bytes(self) -> int:
        """As it is told."""
        return self.proto.ByteSize()

    def as_record(self) -> dict[str, Any]:
        """As the journal keeps it."""
        group = self.group
        sampling = group.request.sampling if group.request.HasField("sampling") else None
        return KeptSession(
            self.proto, self.key_sha256, self.number, group.attempt, group.address, sampling, self.asked, self.nonce
        ).as_record()


@dataclass(slots=True)
class Opening:
    """An OpenSession that waits for its session."""

    request: rollout_pb2.OpenSessionRequest
    key_sha256: bytes
    nonce: bytes
    session: AgentSession | None = None


class Sessions:
    """Every session that is open, and the newest that have ended."""

    def __init__(
        self,
        config: SessionsConfig,
        samples_per_group: int,
        base_url: str,
        line: Line,
        keep: Callable[[AgentSession], None],
    ) -> None:
        """`keep`: puts a session that changed into the journal."""
        self.config = config
        self._write = keep
        self.changed = Signal()
        """Notified when a session was opened or has ended."""
        self._samples_per_group = samples_per_group
        self._base_url = base_url
        self._line = line
        self._joinable: dict[str, SessionGroup] = {}
        self._by_position: dict[int, SessionGroup] = {}
        self._by_key: dict[bytes, AgentSession] = {}
        self.ledger = Ledger[AgentSession](config.kept_ended)

    @property
    def open_count(self) -> int:
        """Sessions whose agents may drive turns."""
        return sum(session.proto.state == OPEN for session in self.ledger)

    @property
    def _waiting(self) -> list[SessionGroup]:
        return [group for group in self._line if isinstance(group, SessionGroup)]

    # ---- after a restart

    def restore(self, kept: Iterable[KeptSession], attempts: Mapping[int, int]) -> None:
        """Know the sessions of an earlier process. `attempts`: of the groups that have not ended, by position."""
        groups: dict[str, SessionGroup] = {}
        for each in kept:
            proto = each.proto
            group = groups.get(each.group_name)
            if group is None:
                request = rollout_pb2.OpenSessionRequest(group_key=proto.group_key, sampling=each.sampling)
                group = groups[each.group_name] = SessionGroup(
                    each.group_name, request, proto.group_size, proto.idle_timeout_ms, proto.total_timeout_ms
                )
                group.address, group.position, group.attempt = each.address, proto.position, each.attempt
                group.version = PolicyVersion.from_proto(proto.dispatch_version)
            session = AgentSession(proto, group, each.key_sha256, each.number, each.asked, each.nonce)
            group.sessions[proto.sample_index] = session
            self._enter(session)
            if session.over:
                self._keep(session)
        for group in groups.values():
            left = [session for session in group.sessions.values() if not session.over]
            if attempts.get(group.position) != group.attempt:
                for session in left:
                    self.ended(session, LOST)
            elif left:
                self._by_position[group.position] = group
                # Where all of them are closed, the group may have been reported: it takes no others.
                if group.request.group_key and group.free_places and any(s.proto.state == OPEN for s in left):
                    self._joinable[group.request.group_key] = group

    def of_attempt(self, position: int, attempt: int) -> SessionGroup | None:
        """The group of an attempt that has sessions which have not ended."""
        group = self._by_position.get(position)
        return group if group is not None and group.attempt == attempt else None

    # ---- opening

    def open(self, request: rollout_pb2.OpenSessionRequest, key_sha256: bytes, nonce: bytes) -> Opening:
        """Join a group or begin one; the opening has its session once a runner has the group."""
        limit = self.config.max_open
        if self.open_count + sum(len(group.openings) for group in self._waiting) >= limit:
            raise SessionsFull(
                f"{limit} sessions are open already (orchestrator.sessions.max_open)",
                name="orchestrator.sessions.max_open",
                limit=limit,
            )
        opening = Opening(request, key_sha256, nonce)
        group = self._joinable.get(request.group_key) if request.group_key else None
        if group is not None and request.group_size not in (0, group.size):
            raise InvalidRequest(
                f"group_size: the group of this key that has a place left was begun with {group.size} members, "
                f"not {request.group_size}",
                field="group_size",
                limit=group.size,
            )
        if group is None:
            group = self._begin(request)
        if group.address:
            self._settle(group, opening)
        else:
            group.openings.append(opening)
        if not group.free_places:
            self._close_to_others(group)
        return opening

    def withdraw(self, opening: Opening) -> None:
        """Give up an opening that has no session yet."""
        for group in self._waiting:
            if opening in group.openings:
                group.openings.remove(opening)
                if not group.openings:
                    self._line.leave(group)
                    self._close_to_others(group)
                elif group.request.group_key:
                    self._joinable.setdefault(group.request.group_key, group)  # its place is free again

    def take(
        self, group: SessionGroup, position: int, attempt: int, address: str, version: PolicyVersion
    ) -> SessionGroup:
        """A group that waits goes to a runner, as the attempt at a position."""
        self._line.leave(group)
        group.position, group.attempt, group.address, group.version = position, attempt, address, version
        self._by_position[position] = group
        openings, group.openings = group.openings, []
        for opening in openings:
            self._settle(group, opening)
        return group

    def _begin(self, request: rollout_pb2.OpenSessionRequest) -> SessionGroup:
        size = request.group_size or (self._samples_per_group if request.group_key else 1)
        group = SessionGroup(
            f"session-{uuid.uuid4().hex}",
            request,
            size,
            request.idle_timeout_ms or int(self.config.idle_timeout_s * 1000),
            request.total_timeout_ms or int(self.config.total_timeout_s * 1000),
        )
        self._line.join(group)
        if request.group_key:
            self._joinable[request.group_key] = group
        return group

    def _settle(self, group: SessionGroup, opening: Opening) -> None:
        index = next(i for i in range(group.size) if i not in group.sessions and i not in group.given_up)
        proto = rollout_pb2.Session(
            session_id=f"{group.name}-{index}",
            state=OPEN,
            group_key=opening.request.group_key,
            group_size=group.size,
            sample_index=index,
            position=group.position,
            dispatch_version=group.version.to_proto(),
            labels=opening.request.labels,
            base_url=self._base_url,
            idle_timeout_ms=group.idle_timeout_ms,
            total_timeout_ms=group.total_timeout_ms,
            trace_id=tracing.trace_id(
                tracing.rollout_trace(group_id_of(group.position), group.version.incarnation, group.attempt, index)
            ),
        )
        number, asked = self.ledger.last_number + 1, asked_by(opening.request)
        session = AgentSession(proto, group, opening.key_sha256, number, asked, opening.nonce)
        group.sessions[index] = opening.session = session
        self._enter(session)
        self._write(session)
        telemetry.sessions_opened.inc()
        self.changed.notify()

    def _enter(self, session: AgentSession) -> None:
        self.ledger.enter(session)
        self._by_key[session.key_sha256] = session

    def _close_to_others(self, group: SessionGroup) -> None:
        key = group.request.group_key
        if self._joinable.get(key) is group:
            del self._joinable[key]

    # ---- looking

    def get(self, session_id: str) -> AgentSession:
        """Return a session."""
        session = self.ledger.get(session_id)
        if session is None:
            raise SessionUnknown(f"session {session_id!r} is not known", session_id=session_id)
        return session

    def find(self, key_sha256: bytes) -> AgentSession:
        """Return the session of a key."""
        session = self._by_key.get(key_sha256)
        if session is None:
            raise SessionUnknown("no session has this key")
        return session

    # ---- what becomes of them

    def closed(self, session: AgentSession, reward: float) -> None:
        """Its runner has its reward."""
        if session.proto.state == OPEN:
            session.proto.state, session.proto.reward = CLOSED, reward
            self._write(session)
            self.changed.notify()

    def ended(self, session: AgentSession, reason: str) -> None:
        """End a session without training on it."""
        if not session.over:
            session.proto.state, session.proto.reason = ENDED, reason
            telemetry.sessions_ended.labels(reason).inc()
            self._write(session)
            self._keep(session)

    def heard(self, ended: Iterable[tuple[str, str]]) -> None:
        """A runner says which sessions ended by themselves, and why: also such that nobody ever opened."""
        for session_id, reason in ended:
            session = self.ledger.get(session_id)
            if session is not None:
                self.ended(session, reason)
                continue
            name, _, index = session_id.rpartition("-")
            for group in self._by_position.values():
                if group.name == name and index.isdecimal():
                    group.given_up.add(int(index))
                    if not group.free_places:
                        self._close_to_others(group)

    def reported(self, position: int, attempt: int, sample_indexes: Iterable[int]) -> None:
        """A runner reported the group, with the trajectories of these members."""
        group = self.of_attempt(position, attempt)
        if group is not None:
            self._close_to_others(group)
            trained = set(sample_indexes)
            for index, session in group.sessions.items():
                if index not in trained:
                    self.ended(session, LATE)

    def trained(self, position: int, attempt: int, step: int) -> None:
        """A step was trained on the group."""
        group = self._forget_attempt(position, attempt)
        for session in group.sessions.values() if group is not None else ():
            if not session.over:
                session.proto.state, session.proto.step = TRAINED, step
                telemetry.sessions_ended.labels("TRAINED").inc()
                self._write(session)
                self._keep(session)

    def group_ended(self, position: int, attempt: int, reason: str) -> None:
        """The attempt is over and will not be trained on."""
        group = self._forget_attempt(position, attempt)
        for session in group.sessions.values() if group is not None else ():
            self.ended(session, reason)

    def end_all(self, reason: str) -> None:
        """The run is over."""
        for group in self._waiting:
            self._line.leave(group)
        self._joinable.clear()
        self._by_position.clear()
        for session in list(self.ledger):
            self.ended(session, reason)
        self.changed.notify()

    def _forget_attempt(self, position: int, attempt: int) -> SessionGroup | None:
        group = self.of_attempt(position, attempt)
        if group is not None:
            del self._by_position[position]
            self._close_to_others(group)
        return group

    def _keep(self, session: AgentSession) -> None:
        """Forget the oldest beyond what is kept."""
        for forgotten in self.ledger.ended(session):
            del self._by_key[forgotten.key_sha256]
        self.changed.notify()
