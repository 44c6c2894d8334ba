"""The client for blocking code. Safe to use from several threads."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Self
from uuid import uuid4

import grpc

from slipstream.api.run.v1.run_pb2 import (
    GetRunRequest,
    PauseRunRequest,
    ResumeRunRequest,
    SaveCheckpointRequest,
    StopRunRequest,
    WatchRunRequest,
)
from slipstream_client.attempts import Attempts
from slipstream_client.base import WATCH_PATIENCE_S, BaseClient
from slipstream_client.connection import Connection
from slipstream_client.errors import SessionsFull
from slipstream_client.requests import (
    Labels,
    cancel_request,
    check_text,
    create_request,
    get_request,
    list_request,
    watch_request,
)
from slipstream_client.rollout import Rollout, Sampling, Version, version_of
from slipstream_client.run import Run
from slipstream_client.session import Session
from slipstream_client.session_requests import (
    close_request,
    get_session_request,
    list_sessions_request,
    open_request,
    wait_ms,
)


class Client(BaseClient):
    """Creates, watches and cancels rollouts of a run.

    `timeout_s` bounds every call, its repeats included; a watch lasts until its `timeout_s`, and gives up when the
    server does not answer for a minute. Whatever fails raises a `SlipstreamClientError`.
    """

    @staticmethod
    def _open(connection: Connection) -> grpc.Channel:
        return connection.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def create_rollout(
        self,
        *,
        environment: str | None = None,
        split: str = "train",
        index: int = 0,
        prompt: str | None = None,
        sample_count: int = 1,
        sampling: Sampling | None = None,
        labels: Labels | None = None,
        include_tokens: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Rollout:
        """Ask for a group of rollouts: of a task of an environment, scored by it, or of a prompt of your own.

        Repeats after a broken connection create nothing twice. Give a `request_id` of your own to have that
        across two calls of this method as well.
        """
        request = create_request(
            environment=environment,
            split=split,
            index=index,
            prompt=prompt,
            sample_count=sample_count,
            sampling=sampling,
            labels=labels,
            include_tokens=include_tokens,
            request_id=request_id,
        )
        return Rollout.from_proto(self._call(self._rollouts.CreateRollout, request, timeout_s).rollout)

    def get_rollout(self, group_id: str, *, timeout_s: float | None = None) -> Rollout:
        """The group as it is now."""
        request = get_request(group_id)
        return Rollout.from_proto(self._call(self._rollouts.GetRollout, request, timeout_s).rollout)

    def list_rollouts(
        self, *, labels: Labels | None = None, page_size: int = 100, timeout_s: float | None = None
    ) -> Iterator[Rollout]:
        """All groups that the run keeps, oldest first; fetched page by page, `timeout_s` for each."""
        token = ""
        while True:
            page = self._call(self._rollouts.ListRollouts, list_request(page_size, token, labels), timeout_s)
            yield from map(Rollout.from_proto, page.rollouts)
            token = page.next_page_token
            if not token:
                return

    def watch_rollouts(
        self,
        after_sequence: int = 0,
        *,
        group_id: str = "",
        labels: Labels | None = None,
        timeout_s: float = math.inf,
    ) -> Iterator[Rollout]:
        """Groups as they change, each change once, until the run ends (with `group_id`, until that group has).

        Goes on by itself where a broken connection cut it. `after_sequence` leaves out what was seen before.
        Raises `DeadlineExceeded` after `timeout_s`.
        """
        attempts = Attempts(self._address, WATCH_PATIENCE_S, timeout_s)
        while True:
            request = watch_request(after_sequence, group_id, labels)
            stream = self._rollouts.WatchRollouts(request, timeout=attempts.stream_s, metadata=self._metadata)
            try:
                for message in stream:
                    attempts.answered()
                    if message.rollout.sequence > after_sequence:
                        after_sequence = message.rollout.sequence
                        yield Rollout.from_proto(message.rollout)
                return
            except grpc.RpcError as error:
                time.sleep(attempts.pause_s(error, stream=True))
            finally:
                stream.cancel()

    def wait_rollout(self, group_id: str, *, timeout_s: float = math.inf) -> Rollout:
        """The group once it has ended. Raises `DeadlineExceeded` after `timeout_s`."""
        for rollout in self.watch_rollouts(group_id=group_id, timeout_s=timeout_s):
            if rollout.ended:
                return rollout
        return self.get_rollout(group_id)

    def cancel_rollout(self, group_id: str, *, timeout_s: float | None = None) -> Rollout:
        """Cancel a group, and return it; one that has ended stays as it is."""
        return Rollout.from_proto(self._call(self._rollouts.CancelRollout, cancel_request(group_id), timeout_s).rollout)

    def open_session(
        self,
        *,
        group_key: str = "",
        group_size: int = 0,
        sampling: Sampling | None = None,
        idle_timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        labels: Labels | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        """Open a session, waiting up to `timeout_s` for an admission slot. Give its `base_url` and `key` to an OpenAI
        client.

        Sessions with the same `group_key` form groups of `group_size`, whose rewards are compared; without a key, close
        it with an advantage. Raises `SessionsFull` where no slot comes in time.
        """
        request = open_request(
            group_key=group_key,
            group_size=group_size,
            sampling=sampling,
            idle_timeout_s=idle_timeout_s,
            total_timeout_s=total_timeout_s,
            labels=labels,
            request_id=request_id,
        )
        attempts = Attempts(self._address, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            request.wait_ms = wait_ms(attempts.left_s)
            try:
                answer = self._call(self._rollouts.OpenSession, request, attempts.left_s)
            except SessionsFull as error:
                time.sleep(attempts.no_room_s(error))
            else:
                return Session.from_proto(answer.session, answer.key)

    def close_session(
        self,
        session_id: str,
        reward: float | None = None,
        *,
        advantage: float | None = None,
        discard: bool = False,
        timeout_s: float | None = None,
    ) -> Session:
        """Close a session with its reward, or `discard` it; returns it. One that had ended before says why.

        Raises `ValueError` without either.
        """
        request = close_request(session_id, reward, advantage, discard=discard)
        return Session.from_proto(self._call(self._rollouts.CloseSession, request, timeout_s).session)

    def get_session(self, session_id: str, *, timeout_s: float | None = None) -> Session:
        """The session as it is now, without its key."""
        request = get_session_request(session_id)
        return Session.from_proto(self._call(self._rollouts.GetSession, request, timeout_s).session)

    def list_sessions(
        self, *, labels: Labels | None = None, page_size: int = 100, timeout_s: float | None = None
    ) -> Iterator[Session]:
        """All sessions that the run keeps, oldest first; fetched page by page, `timeout_s` for each."""
        token = ""
        while True:
            request = list_sessions_request(page_size, token, labels)
            page = self._call(self._rollouts.ListSessions, request, timeout_s)
            yield from map(Session.from_proto, page.sessions)
            token = page.next_page_token
            if not token:
                return

    def get_run(self, *, timeout_s: float | None = None) -> Run:
        """The run as it is now."""
        return Run.from_proto(self._call(self._runs.GetRun, GetRunRequest(), timeout_s).run)

    def watch_run(self, *, timeout_s: float = math.inf) -> Iterator[Run]:
        """The run, now and each time it changes, until it has ended. Raises `DeadlineExceeded` after `timeout_s`."""
        attempts = Attempts(self._address, WATCH_PATIENCE_S, timeout_s)
        last: Run | None = None
        while True:
            stream = self._runs.WatchRun(WatchRunRequest(), timeout=attempts.stream_s, metadata=self._metadata)
            try:
                for message in stream:
                    attempts.answered()
                    run = Run.from_proto(message.run)
                    if run != last:
                        last = run
                        yield run
                return
            except grpc.RpcError as error:
                time.sleep(attempts.pause_s(error, stream=True))
            finally:
                stream.cancel()

    def pause_run(self, reason: str = "", *, timeout_s: float | None = None) -> Run:
        """Start no more groups until `resume_run`; what runs goes on."""
        check_text(reason=reason)
        request = PauseRunRequest(request_id=str(uuid4()), reason=reason)
        return Run.from_proto(self._call(self._runs.PauseRun, request, timeout_s).run)

    def resume_run(self, *, timeout_s: float | None = None) -> Run:
        """Undo `pause_run`."""
        request = ResumeRunRequest(request_id=str(uuid4()))
        return Run.from_proto(self._call(self._runs.ResumeRun, request, timeout_s).run)

    def stop_run(self, reason: str = "", *, timeout_s: float | None = None) -> Run:
        """End the run now; it is not gone on with by itself."""
        check_text(reason=reason)
        request = StopRunRequest(request_id=str(uuid4()), reason=reason)
        return Run.from_proto(self._call(self._runs.StopRun, request, timeout_s).run)

    def save_checkpoint(self, *, timeout_s: float | None = None) -> Version:
        """Have the trainer write a checkpoint, and wait until it is durable: up to a step, and the writing."""
        request = SaveCheckpointRequest(request_id=str(uuid4()))
        return version_of(self._call(self._runs.SaveCheckpoint, request, timeout_s).version)

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        attempts = Attempts(self._address, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.call_s, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.pause_s(error))
