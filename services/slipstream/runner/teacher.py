"""Asks teacher workers how likely they find what a group sampled, once it has its scores."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import grpc
import structlog

from slipstream.api.inference.v1 import teacher_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import DeadlineExceeded, Draining, EngineFull, TeacherAway, Unreachable, from_rpc_error
from slipstream.runner.peers import Peers
from slipstream.runner.rollout import Rollout

log = structlog.get_logger()

UNKNOWN = 1.0
"""Of tokens that nobody asked about."""
CALL_TOKENS = 65536
"""Of one call, unless a single sequence has more: an answer then lies far below what a message holds."""
RETRY_PAUSE_S = 0.3
_ELSEWHERE = (Unreachable, Draining, EngineFull, DeadlineExceeded)
"""What another worker, or the same one later, may do better."""


class TeacherClient:
    """All teacher workers of a run, taken in turn. Without any, nothing is asked."""

    def __init__(self, peers: Peers, addresses: Sequence[str], timeout_s: float) -> None:
        self._peers = peers
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._turns = itertools.count()

    @property
    def configured(self) -> bool:
        """Whether there is any to ask."""
        return bool(self._addresses)

    async def judge(self, rollouts: Sequence[Rollout], temperature: float, *, until_s: float = 0.0) -> None:
        """Fill in `teacher_logprobs` of each. Raises `TeacherAway`, or what the teacher refuses.

        `until_s`: in `time.monotonic()` terms, how long workers that are away are waited for if that is longer.
        """
        if not self._addresses:
            return
        deadline_s = max(time.monotonic() + self._timeout_s, until_s)
        for call in _calls([rollout for rollout in rollouts if rollout.sampled]):
            request = teacher_pb2.ScoreTokensRequest(
                sequences=[_sequence(rollout) for rollout in call], temperature=temperature
            )
            answer = await self._ask(request, deadline_s)
            for rollout, judged in zip(call, answer.sequences, strict=True):
                rollout.teacher_logprobs = _at_positions(rollout, judged.logprobs)

    async def _ask(self, request: teacher_pb2.ScoreTokensRequest, deadline_s: float) -> teacher_pb2.ScoreTokensResponse:
        while True:
            address = self._addresses[next(self._turns) % len(self._addresses)]
            left_s = deadline_s - time.monotonic()
            try:
                timeout_s = max(min(left_s, self._timeout_s), RETRY_PAUSE_S)
                return await self._peers.teacher(address).ScoreTokens(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as raised:
                error = from_rpc_error(raised)
            if not isinstance(error, _ELSEWHERE):
                raise error
            log.info("teacher_away", address=address, reason=error.reason)
            if time.monotonic() + RETRY_PAUSE_S > deadline_s:
                raise TeacherAway(f"no teacher worker answered in time: {error.message}")
            await asyncio.sleep(RETRY_PAUSE_S)


def _calls(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    calls: list[list[Rollout]] = []
    tokens = 0
    for rollout in rollouts:
        if not calls or tokens + len(rollout.token_ids) > CALL_TOKENS:
            calls.append([])
            tokens = 0
        calls[-1].append(rollout)
        tokens += len(rollout.token_ids)
    return calls


def _sequence(rollout: Rollout) -> teacher_pb2.TokenSequence:
    ranges = [types_pb2.RowRange(start=start, end=end) for start, end in rollout.sampled]
    return teacher_pb2.TokenSequence(token_ids=rollout.token_ids, ranges=ranges)


def _at_positions(rollout: Rollout, logprobs: Sequence[float]) -> list[float]:
    values = [UNKNOWN] * len(rollout.token_ids)
    at = 0
    for start, end in rollout.sampled:
        values[start:end] = logprobs[at : at + end - start]
        at += end - start
    return values
