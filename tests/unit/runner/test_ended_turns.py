"""A turn whose listener wants no more is ended at the decode worker, whatever comes in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import pytest

from slipstream.api.inference.v1 import decode_pb2
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.routing.v1 import routing_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.runner.attempt import Inference, TurnAttempt, Wish
from slipstream.runner.rollout import STOP, Rollout
from slipstream.runner.watch import WorkerWatch

VERSION = types_pb2.PolicyVersion(incarnation=1, step=1)
ROUTES = types_pb2.RowsRef(holder="decode-1", key="d/0", ranges=[types_pb2.RowRange(start=1, end=4)], size_bytes=9)


class Stream:
    """Three tokens; once it was ended, where their routes are."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended
        self._messages = self._tell()

    def __aiter__(self) -> AsyncIterator[decode_pb2.DecodeResponse]:
        return self._messages

    async def _tell(self) -> AsyncIterator[decode_pb2.DecodeResponse]:
        spans = [types_pb2.VersionSpan(token_count=3, version=VERSION, kv_oldest_version=VERSION)]
        chunk = decode_pb2.SampleChunk(token_ids=[5, 6, 7], logprobs=[-1.0] * 3, spans=spans)
        yield decode_pb2.DecodeResponse(chunks=[chunk])
        await self._ended.wait()
        last = decode_pb2.SampleChunk(finish_reason=types_pb2.FINISH_REASON_ABORTED, routes=ROUTES)
        yield decode_pb2.DecodeResponse(chunks=[last])

    def cancel(self) -> None:
        pass


class Workers:
    """A router and a decode worker, which answers the first so many calls to end something never."""

    runner_id = runner_epoch = ""

    def __init__(self, unanswered: int) -> None:
        self.router = self
        self.asked, self.ended = asyncio.Event(), asyncio.Event()
        self.asked_to_end = 0
        self.released: list[types_pb2.RowsRef] = []
        self._unanswered = unanswered

    async def place(self, request: Any, timeout_s: float) -> routing_pb2.PlaceResponse:
        return routing_pb2.PlaceResponse(
            placement_id="p", decode=routing_pb2.WorkerRef(replica="decode-1", address="here", epoch="1")
        )

    def decode(self, address: str) -> Workers:
        return self

    def Decode(self, request: Any) -> Stream:
        return Stream(self.ended)

    async def Abort(self, request: Any, timeout: float) -> None:
        self.asked_to_end += 1
        self.asked.set()
        if self.asked_to_end <= self._unanswered:
            await asyncio.Event().wait()
        self.ended.set()

    def release_routes(self, refs: Sequence[types_pb2.RowsRef]) -> None:
        self.released += refs

    def release_placement(self, placement_id: str) -> None:
        pass


async def enough(news: Mapping[int, tuple[Sequence[int], Sequence[float]]]) -> Mapping[int, int]:
    return {index: 2 for index, (tokens, _) in news.items() if tokens}


def begun(workers: Workers) -> tuple[TurnAttempt, Rollout]:
    assignment = runner_pb2.GroupAssignment(
        group_id="train-1",
        attempt=1,
        sample_count=1,
        dispatch_version=VERSION,
        sampling=types_pb2.Sampling(max_new_tokens=8),
    )
    rollout = Rollout([1, 2])
    peers = cast(Any, workers)
    inference = Inference(peers, WorkerWatch(peers), 16, 5.0)
    return TurnAttempt(inference, assignment, {0: rollout}, "", Wish(listen=enough)), rollout


async def test_it_is_ended_once_and_has_the_rows_of_its_tokens():
    workers = Workers(unanswered=0)
    attempt, rollout = begun(workers)
    await attempt.run(())
    assert (rollout.answer, rollout.finish_reason, workers.asked_to_end) == ([5, 6], STOP, 1)
    assert [(part.start, part.end) for ref in rollout.routes for part in ref.ranges] == [(1, 3)]
    assert workers.released == []


async def test_cancelled_before_the_worker_says_that_it_is_ended_it_is_ended_again():
    """Whoever cancels takes the return for word that its blocks are free."""
    workers = Workers(unanswered=1)
    attempt, _ = begun(workers)
    running = asyncio.create_task(attempt.run(()))
    async with asyncio.timeout(60):
        await workers.asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (workers.asked_to_end, workers.ended.is_set()) == (2, True)
