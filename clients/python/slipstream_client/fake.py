"""A server for tests of code that uses this client: real gRPC on loopback, rollouts from a script.

    with FakeServer() as server:
        server.script(Script(texts=["nus"], rewards=[1.0]), environment="spelling")
        with Client.connect(server.address) as client:
            rollout = client.create_rollout(environment="spelling")
            assert client.wait_rollout(rollout.group_id, timeout_s=5).samples[0].text == "nus"

It keeps to the contract in `rollout.proto`: request ids, states, sequences, errors and their reasons.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import grpc

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, runner_pb2
from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream_client.connection import CHANNEL_OPTIONS
from slipstream_client.errors import (
    Draining,
    EnvironmentUnknown,
    InvalidRequest,
    RequestIdReused,
    RolloutUnknown,
    RunEnded,
    SlipstreamClientError,
    Unauthenticated,
)
from slipstream_client.fake_sessions import FakeSessions
from slipstream_client.status import STATUS_KEY, status_bytes

_ENDED = (rollout_pb2.ROLLOUT_STATE_FINISHED, rollout_pb2.ROLLOUT_STATE_FAILED, rollout_pb2.ROLLOUT_STATE_CANCELLED)
_VERSION = types_pb2.PolicyVersion(incarnation=1, step=0)
_THREADS = 32
"""Each open watch keeps one."""
_LOOK_S = 0.2
"""A watch whose client is gone is noticed within this time."""


@dataclass(frozen=True)
class Script:
    """What becomes of a group. Texts and rewards are dealt to its samples in turn."""

    texts: Sequence[str] = ("",)
    rewards: Sequence[float] = (0.0,)
    """A sample counts as correct from 1."""
    prompt: str = ""
    run_s: float = 0.0
    """How long it runs. `math.inf`: until it is cancelled."""
    reason: str = ""
    """Set: it fails, with this reason."""


class FakeServer:
    """Serves RolloutService and RunService. Safe to use from several threads."""

    def __init__(
        self,
        *,
        token: str | None = None,
        port: int = 0,
        run_id: str = "fake",
        gateway_url: str = "http://127.0.0.1:1/v1",
    ) -> None:
        """`port` 0 takes a free one; `address` says which. `gateway_url`: what sessions are told."""
        self._sessions = FakeSessions(gateway_url)
        self.created: list[rollout_pb2.CreateRolloutRequest] = []
        """Every CreateRollout that arrived, repeats and refused ones too."""
        self._token = token
        self._changed = threading.Condition()
        self._scripts: dict[str, Script] = {}
        self._groups: dict[str, rollout_pb2.Rollout] = {}
        self._timers: list[threading.Timer] = []
        self._answered: dict[str, tuple[bytes, str]] = {}
        self._sequence = 0
        self._unavailable = 0
        self._lose_next = False
        self._run = run_pb2.Run(run_id=run_id, state=run_pb2.RUN_STATE_RUNNING, phase="training")
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="fake"),
            options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)),
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(_Rollouts(self), self._server)
        run_pb2_grpc.add_RunServiceServicer_to_server(_Runs(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, and every call."""
        for timer in self._timers:
            timer.cancel()
        self.end_run("the fake stopped")
        self._server.stop(grace=None).wait(5.0)

    # ---- what a test says

    def script(self, script: Script, *, environment: str = "") -> None:
        """From now on, groups of this environment go so; an empty name means prompts of the caller's own."""
        with self._changed:
            self._scripts[environment] = script

    def unavailable(self, times: int = 1) -> None:
        """Refuse the next calls with UNAVAILABLE, as a server that restarts does."""
        with self._changed:
            self._unavailable = times

    def lose_next_answer(self) -> None:
        """Do what the next CreateRollout asks and then fail it, as a connection that breaks in between does."""
        with self._changed:
            self._lose_next = True

    def end_run(self, reason: str = "finished") -> None:
        """End the run: open groups are cancelled, watches end."""
        with self._changed:
            if self._run.state == run_pb2.RUN_STATE_RUNNING:
                self._run.state, self._run.phase, self._run.reason = run_pb2.RUN_STATE_FINISHED, "ended", reason
            for group in self._groups.values():
                self._end(group, rollout_pb2.ROLLOUT_STATE_CANCELLED, reason)
            self._sessions.end_all("RUN_FINISHED")
            self._changed.notify_all()

    def end_session(self, session_id: str, reason: str = "IDLE_TIMEOUT") -> None:
        """End a session untrained, as a timeout does."""
        with self._changed:
            self._sessions.end(session_id, reason)

    # ---- what the servicers use

    def admit(self, context: grpc.ServicerContext) -> None:
        """Check the token, and whether calls are refused."""
        if self._token is not None:
            given = dict(context.invocation_metadata()).get("authorization")
            if given != f"Bearer {self._token}":
                message = "the bearer token is wrong" if given else "a bearer token is required"
                _refuse(context, Unauthenticated(message))
        with self._changed:
            refused = self._unavailable > 0
            self._unavailable -= refused
        if refused:
            _refuse(context, Draining("this process is stopping"))

    def create(self, request: rollout_pb2.CreateRolloutRequest) -> rollout_pb2.Rollout:
        with self._changed:
            kept = rollout_pb2.CreateRolloutRequest()
            kept.CopyFrom(request)
            self.created.append(kept)
            _check(request)
            body = request.SerializeToString(deterministic=True)
            first = self._answered.get(request.request_id)
            if first is not None and first[0] != body:
                raise RequestIdReused("this request_id came with another body before")
            if first is None:
                first = self._answered[request.request_id] = (body, self._start(request).group_id)
            if self._lose_next:
                self._lose_next = False
                raise Draining("the connection broke")
            return self._copy(self._groups[first[1]])

    def _start(self, request: rollout_pb2.CreateRolloutRequest) -> rollout_pb2.Rollout:
        if self._run.state != run_pb2.RUN_STATE_RUNNING:
            how = run_pb2.RunState.Name(self._run.state)
            sentence = f"the run has ended ({self._run.reason}); it takes no more rollouts"
            raise RunEnded(sentence, metadata={"state": how})
        environment = request.task.environment
        script = self._scripts.get(environment)
        if script is None and environment:
            known = ", ".join(name for name in self._scripts if name)
            raise EnvironmentUnknown(f"no environment is called {environment!r}", metadata={"known": known})
        group = rollout_pb2.Rollout(
            group_id=f"external-{len(self._groups)}",
            environment=environment,
            state=rollout_pb2.ROLLOUT_STATE_QUEUED,
            labels=request.labels,
        )
        self._groups[group.group_id] = group
        self._touch(group)
        timer = threading.Timer(0.0, self._play, (group, request, script or Script()))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()
        return group

    def _play(self, group: rollout_pb2.Rollout, request: rollout_pb2.CreateRolloutRequest, script: Script) -> None:
        with self._changed:
            if group.state in _ENDED:
                return
            group.state = rollout_pb2.ROLLOUT_STATE_RUNNING
            group.dispatch_version.CopyFrom(_VERSION)
            self._touch(group)
            ends_s = time.monotonic() + script.run_s
            while group.state not in _ENDED and (left_s := ends_s - time.monotonic()) > 0:
                self._changed.wait(min(left_s, 60.0))
            if group.state in _ENDED:
                return
            if script.reason:
                self._end(group, rollout_pb2.ROLLOUT_STATE_FAILED, script.reason)
                return
            group.prompt = script.prompt
            group.records.extend(_record(group, request, script, index) for index in range(request.sample_count))
            self._end(group, rollout_pb2.ROLLOUT_STATE_FINISHED, "")

    @contextmanager
    def sessions(self) -> Iterator[FakeSessions]:
        """All sessions, for one call."""
        with self._changed:
            yield self._sessions

    def get(self, group_id: str) -> rollout_pb2.Rollout:
        with self._changed:
            return self._copy(self._find(group_id))

    def cancel(self, group_id: str) -> rollout_pb2.Rollout:
        with self._changed:
            self._end(self._find(group_id), rollout_pb2.ROLLOUT_STATE_CANCELLED, "CLIENT")
            return self._copy(self._find(group_id))

    def page(self, token: str, size: int, labels: Mapping[str, str]) -> tuple[list[rollout_pb2.Rollout], str]:
        with self._changed:
            found = [(n, g) for n, g in enumerate(self._groups.values()) if n >= int(token or 0) and _has(g, labels)]
            following = str(found[size][0]) if len(found) > size else ""
            return [self._copy(group) for _, group in found[:size]], following

    def changes(self, request: rollout_pb2.WatchRolloutsRequest, context: Any) -> Iterator[rollout_pb2.Rollout]:
        sequence = request.after_sequence
        if sequence > self._sequence:
            limit = {"field": "after_sequence", "limit": str(self._sequence)}
            raise InvalidRequest(f"after_sequence: the newest is {self._sequence}", metadata=limit)
        while context.is_active():
            with self._changed:
                watched = [self._find(request.group_id)] if request.group_id else list(self._groups.values())
                later = [g for g in watched if g.sequence > sequence and _has(g, request.filter.labels)]
                change = self._copy(min(later, key=lambda g: g.sequence)) if later else None
                if change is None:
                    ended = self._run.state != run_pb2.RUN_STATE_RUNNING
                    if ended or (request.group_id and watched[0].state in _ENDED):
                        return
                    self._changed.wait(_LOOK_S)
            if change is not None:
                sequence = change.sequence
                yield change

    def runs(self, context: Any) -> Iterator[run_pb2.Run]:
        last = None
        while context.is_active():
            with self._changed:
                run = run_pb2.Run()
                run.CopyFrom(self._run)
                if run == last:
                    self._changed.wait(_LOOK_S)
                    continue
            yield (last := run)
            if run.state != run_pb2.RUN_STATE_RUNNING:
                return

    @property
    def run(self) -> run_pb2.Run:
        return self._run

    def _find(self, group_id: str) -> rollout_pb2.Rollout:
        if group_id not in self._groups:
            raise RolloutUnknown(f"group {group_id!r} is not known", metadata={"group_id": group_id})
        return self._groups[group_id]

    def _end(self, group: rollout_pb2.Rollout, state: rollout_pb2.RolloutState, reason: str) -> None:
        if group.state not in _ENDED:
            group.state, group.reason = state, reason
            self._touch(group)

    def _touch(self, group: rollout_pb2.Rollout) -> None:
        self._sequence += 1
        group.sequence = self._sequence
        self._changed.notify_all()

    @staticmethod
    def _copy(group: rollout_pb2.Rollout) -> rollout_pb2.Rollout:
        copy = rollout_pb2.Rollout()
        copy.CopyFrom(group)
        return copy


class _Rollouts(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def CreateRollout(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.CreateRolloutResponse:
        self._server.admit(context)
        try:
            return rollout_pb2.CreateRolloutResponse(rollout=self._server.create(request))
        except SlipstreamClientError as error:
            _refuse(context, error)

    def GetRollout(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.GetRolloutResponse:
        self._server.admit(context)
        try:
            return rollout_pb2.GetRolloutResponse(rollout=self._server.get(request.group_id))
        except SlipstreamClientError as error:
            _refuse(context, error)

    def ListRollouts(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.ListRolloutsResponse:
        self._server.admit(context)
        rollouts, token = self._server.page(request.page_token, request.page_size or 100, request.filter.labels)
        return rollout_pb2.ListRolloutsResponse(rollouts=rollouts, next_page_token=token)

    def WatchRollouts(self, request: Any, context: Any) -> Iterator[rollout_pb2.WatchRolloutsResponse]:
        self._server.admit(context)
        try:
            for rollout in self._server.changes(request, context):
                yield rollout_pb2.WatchRolloutsResponse(rollout=rollout)
        except SlipstreamClientError as error:
            _refuse(context, error)

    def CancelRollout(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.CancelRolloutResponse:
        self._server.admit(context)
        try:
            return rollout_pb2.CancelRolloutResponse(rollout=self._server.cancel(request.group_id))
        except SlipstreamClientError as error:
            _refuse(context, error)

    def OpenSession(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.OpenSessionResponse:
        self._server.admit(context)
        try:
            with self._server.sessions() as sessions:
                if self._server.run.state != run_pb2.RUN_STATE_RUNNING:
                    raise RunEnded("the run has ended; it takes no more sessions")
                return sessions.open(request)
        except SlipstreamClientError as error:
            _refuse(context, error)

    def GetSession(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.GetSessionResponse:
        self._server.admit(context)
        try:
            with self._server.sessions() as sessions:
                return rollout_pb2.GetSessionResponse(session=sessions.get(request.session_id))
        except SlipstreamClientError as error:
            _refuse(context, error)

    def ListSessions(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.ListSessionsResponse:
        self._server.admit(context)
        with self._server.sessions() as sessions:
            found, token = sessions.page(request.page_token, request.page_size or 100, request.filter.labels)
            return rollout_pb2.ListSessionsResponse(sessions=found, next_page_token=token)

    def CloseSession(self, request: Any, context: grpc.ServicerContext) -> rollout_pb2.CloseSessionResponse:
        self._server.admit(context)
        try:
            with self._server.sessions() as sessions:
                return rollout_pb2.CloseSessionResponse(session=sessions.close(request))
        except SlipstreamClientError as error:
            _refuse(context, error)


class _Runs(run_pb2_grpc.RunServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def GetRun(self, request: Any, context: grpc.ServicerContext) -> run_pb2.GetRunResponse:
        self._server.admit(context)
        return run_pb2.GetRunResponse(run=self._server.run)

    def WatchRun(self, request: Any, context: Any) -> Iterator[run_pb2.WatchRunResponse]:
        self._server.admit(context)
        for run in self._server.runs(context):
            yield run_pb2.WatchRunResponse(run=run)


def _check(request: rollout_pb2.CreateRolloutRequest) -> None:
    """The rules of `rollout.proto` that a caller is most likely to break."""
    if not 1 <= request.sample_count <= 64:
        bounds = "must be greater than or equal to 1 and less than or equal to 64"
        metadata = {"field": "sample_count", "rule": "int32.gte_lte", "limit": bounds}
        raise InvalidRequest(f"sample_count: {bounds}", metadata=metadata)
    if request.HasField("task") and request.task.split not in ("", "train", "held_out"):
        metadata = {"field": "task.split", "rule": "string.in", "limit": "train, held_out"}
        raise InvalidRequest("task.split: must be train or held_out", metadata=metadata)


def _record(
    group: rollout_pb2.Rollout, request: rollout_pb2.CreateRolloutRequest, script: Script, index: int
) -> runner_pb2.RolloutRecord:
    """A token a character: nothing here knows a tokenizer."""
    text, reward = script.texts[index % len(script.texts)], script.rewards[index % len(script.rewards)]
    prompt_count = max(len(request.prompt or script.prompt), 1)
    tokens = [ord(character) for character in text] if request.include_tokens else []
    return runner_pb2.RolloutRecord(
        rollout_id=f"{group.group_id}.1.{index}",
        sample_index=index,
        reward=reward,
        correct=reward >= 1.0,
        prompt_token_count=prompt_count,
        token_count=prompt_count + len(text) + 1,
        finish_reason=types_pb2.FINISH_REASON_STOP,
        spans=[types_pb2.VersionSpan(token_count=len(text) + 1, version=_VERSION)],
        answer=runner_pb2.Answer(text=text, token_ids=tokens, logprobs=[0.0] * len(tokens)),
    )


def _has(group: rollout_pb2.Rollout, labels: Mapping[str, str]) -> bool:
    return all(group.labels.get(key) == value for key, value in labels.items())


def _refuse(context: grpc.ServicerContext, error: SlipstreamClientError) -> NoReturn:
    status = status_bytes(error.code.value[0], str(error), error.reason, error.metadata)
    context.set_trailing_metadata(((STATUS_KEY, status),))
    context.abort(error.code, str(error))
    raise AssertionError("abort raises")
