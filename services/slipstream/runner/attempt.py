"""One request for rollouts that share their tokens so far, through router, prefill and decode.

    Place -> Prefill (KV stays at the worker) -> Decode (pulls the KV, streams samples) -> Release

The router leaves Prefill out where the decode worker may compute the prompt itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
import structlog

from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.routing.v1 import routing_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import errors, tracing
from slipstream.common.tracing import TraceContext
from slipstream.common.version import PolicyVersion
from slipstream.engine.hashing import block_hashes
from slipstream.runner import telemetry
from slipstream.runner.peers import Peers
from slipstream.runner.rollout import LENGTH, STOP, Rollout, Segment
from slipstream.runner.rollout_record import Timings
from slipstream.runner.spares import Spares
from slipstream.runner.watch import WorkerWatch

log = structlog.get_logger()

PREFILL_AT_FAULT = (errors.KvTransferFailed, errors.KvUnknown, errors.KvMismatch)
"""What a decode worker says of the prefill worker."""
TRAINING = runner_pb2.GROUP_PURPOSE_TRAINING
Listen = Callable[[Mapping[int, tuple[Sequence[int], Sequence[float]]]], Awaitable[Mapping[int, int]]]
"""Takes new tokens and log-probabilities by index of their rollout, only such as stay; answers which turns end now, and
after how many of these tokens."""
FLUSH_MS = 50
"""How long a token waits at the worker while somebody listens."""
SPARES_FLUSH_MS = 100
"""The same where members are given up once enough have ended."""
NOTHING: Mapping[int, Any] = MappingProxyType({})
ABORTED = types_pb2.FINISH_REASON_ABORTED
ABORT_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 30.0


def attempt_name(assignment: runner_pb2.GroupAssignment) -> str:
    """What this attempt at a group is called at router, workers and spool.

    The incarnation is part of it: a position that is run again after a restore of the trainer may have the number of an
    attempt of the dead one, whose KV handles, routes and rows are kept under that name, and a first write wins.
    """
    return f"{assignment.group_id}.{assignment.dispatch_version.incarnation}.{assignment.attempt}"


@dataclass(frozen=True)
class Inference:
    """What a runner asks workers with."""

    peers: Peers
    watch: WorkerWatch
    block_size_tokens: int
    prefill_timeout_s: float


@dataclass(frozen=True)
class Wish:
    """What is particular about one turn."""

    seed: int | None = None
    """None: the group's."""
    draws: Mapping[int, int] = field(default_factory=dict[int, int])
    """With a seed of its own, whose draws each rollout's are: the same seed gives the same answers in any place."""
    listen: Listen | None = None
    """Told what comes, as it comes."""


class TurnAttempt:
    """A request from its placement to the end of its stream, and what must be given back when it ends early."""

    def __init__(
        self,
        inference: Inference,
        assignment: runner_pb2.GroupAssignment,
        rollouts: Mapping[int, Rollout],
        suffix: str,
        wish: Wish | None = None,
        spares: Spares | None = None,
        shared: Mapping[int, tuple[str, TraceContext]] = NOTHING,
    ) -> None:
        """`rollouts`: by index in the group. `suffix`: tells its name from those of other requests of this attempt at
        the group, whose KV handles and routes may be kept. `spares`: ends it as soon as enough members have ended.
        `shared`: of a turn of several, each rollout's id and its turn in its own trace, by index."""
        self._spares = spares
        self._shared = shared
        self._turns = dict(shared.values())
        self._inference = inference
        self._peers = inference.peers
        self._assignment = assignment
        self._rollouts = rollouts
        self._suffix = suffix
        self._wish = wish or Wish()
        self._told = dict.fromkeys(rollouts, 0)
        self._stopped: set[int] = set()
        """Rollouts whose turn whoever listens has ended."""
        self._running = set(rollouts)
        """Rollouts that the decode worker has not told the end of."""
        self._ended_early = False
        """Whether the decode worker has ended all that ran, and says so."""
        self.request_id = attempt_name(assignment) + self._suffix
        self.placement: routing_pb2.PlaceResponse | None = None
        self.segments = {index: Segment() for index in rollouts}
        self._prefilling = self._decoding = False
        self._prompt_routes: types_pb2.RowsRef | None = None
        self._cached_token_count = 0
        self._timings = Timings()
        self._decoding_since_s = 0.0
        first = next(iter(rollouts.values()))
        self._token_ids = list(first.token_ids)
        self._first_route_position = first.first_route_position
        self._max_new_tokens = first.tokens_left(assignment.sampling.max_new_tokens)

    async def run(self, avoid: Sequence[str]) -> None:
        """Sample until all rollouts have ended. However it ends, its rollouts have what can be kept of it.

        Cancelling the task aborts the request at both workers and returns only when their blocks are free. Raises
        `SlipstreamError`.
        """
        outcome = "given_up"
        left: list[types_pb2.RowsRef] | None = None
        try:
            await self._place_prefill_decode(avoid)
            self._check_ended()
            left = self._settle(gone=False)
            outcome = "stopped" if self._stopped or any(map(self._given_up, self.segments)) else "finished"
        except (grpc.aio.AioRpcError, errors.SlipstreamError) as error:
            rebuilt = errors.from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error
            left = self._settle(gone=isinstance(rebuilt, errors.Unreachable))
            if self.delivered:
                outcome = "broken_off"
            raise rebuilt from error
        finally:
            telemetry.turns.labels(outcome).inc()
            self._trace_decodes()
            self._peers.release_routes(self._references() if left is None else left)
            try:
                if outcome != "finished":
                    await self._abort_whole()
            finally:
                if self.placement is not None:
                    self._peers.release_placement(self.placement.placement_id)

    @property
    def delivered(self) -> dict[int, int]:
        """Tokens by rollout, where there are any."""
        return {index: len(segment.token_ids) for index, segment in self.segments.items() if segment.token_ids}

    def failed_replica(self, error: errors.SlipstreamError) -> str:
        """Which of its workers to avoid from now on."""
        assert self.placement is not None
        if self._prefilling and (not self._decoding or isinstance(error, PREFILL_AT_FAULT)):
            return self.placement.prefill.replica
        return self.placement.decode.replica

    async def _place_prefill_decode(self, avoid: Sequence[str]) -> None:
        assignment = self._assignment
        asked_s = time.monotonic()
        request = routing_pb2.PlaceRequest(
            request_id=self.request_id,
            group_id=assignment.group_id,
            block_hashes=block_hashes(assignment.salt, self._token_ids[:-1], self._inference.block_size_tokens),
            prompt_token_count=len(self._token_ids),
            sample_count=len(self._rollouts),
            max_new_tokens=self._max_new_tokens,
            min_policy_version=assignment.dispatch_version,
            avoid_replicas=avoid,
            runner_id=self._peers.runner_id,
            runner_epoch=self._peers.runner_epoch,
        )
        with tracing.span("place", copies=self._turns, request_id=self.request_id):
            self.placement = placement = await self._peers.place(request, PLACE_TIMEOUT_S)
        placed_s = time.monotonic()
        self._timings.queue_s = placed_s - asked_s
        prompt = prefill_pb2.Prompt(new_token_ids=self._token_ids)
        kv: prefill_pb2.KvHandle | None = None
        if placement.HasField("prefill"):
            self._prefilling = True
            replica, tokens = placement.prefill.replica, len(self._token_ids)
            with tracing.span("prefill", copies=self._turns, replica=replica, tokens=tokens):
                prefilled = await self._prefill(prompt, placement.prefill)
            kv = prefilled.kv if prefilled.HasField("kv") else None
            self._cached_token_count = prefilled.cached_token_count
            if prefilled.HasField("routes"):
                self._prompt_routes = prefilled.routes
        self._decoding = True
        self._decoding_since_s = time.monotonic()
        self._timings.prefill_s = self._decoding_since_s - placed_s
        with tracing.span("decode", replica=placement.decode.replica, samples=len(self._rollouts)):
            await self._decode(self._peers.decode(placement.decode.address).Decode(self._decode_request(prompt, kv)))

    async def _decode(self, stream: Any) -> None:
        """Take in what a stream delivers, to its end or to where nobody wants more."""
        async for message in stream:
            self._take_in(message)
            if any(self._given_up(index) for index in self._rollouts):
                stream.cancel()
                return
            if self._wish.listen is not None and await self._tell(self._wish.listen) and self._running:
                return await self._end_early(stream)

    def _take_in(self, message: decode_pb2.DecodeResponse) -> None:
        indexes = list(self._rollouts)
        for chunk in message.chunks:
            index = indexes[chunk.sample_index]
            if index not in self._stopped:
                self.segments[index].extend(chunk)
            elif chunk.HasField("routes"):
                self.segments[index].routes = chunk.routes
            if chunk.finish_reason:
                self._running.discard(index)
            if not self._prefilling:
                self._cached_token_count = max(self._cached_token_count, chunk.cached_token_count)
            if chunk.finish_reason in (STOP, LENGTH) and self._spares is not None:
                self._spares.ended(index)
        if message.HasField("prompt_routes"):
            self._prompt_routes = message.prompt_routes

    async def _end_early(self, stream: Any) -> None:
        """Have the worker end what nobody wants more of; its last word is where the routes are. Without it they are
        unknown."""
        assert self.placement is not None
        worker = self.placement.decode
        try:
            with errors.rpc_errors():
                async with asyncio.timeout(ABORT_TIMEOUT_S), self._inference.watch.asking(worker):
                    await self._abort_decode(worker)
                    self._ended_early = True
                    async for message in stream:
                        self._take_in(message)
        except (errors.SlipstreamError, TimeoutError) as error:
            log.info("routes_of_stopped_unknown", request_id=self.request_id, replica=worker.replica, detail=str(error))
        finally:
            stream.cancel()

    def _abort_decode(self, worker: routing_pb2.WorkerRef) -> Awaitable[object]:
        request = decode_pb2.DecodeServiceAbortRequest(request_id=self.request_id, worker_epoch=worker.epoch)
        return self._peers.decode(worker.address).Abort(request, timeout=ABORT_TIMEOUT_S)

    def _given_up(self, index: int) -> bool:
        return self._spares is not None and self._spares.gives_up(index)

    async def _tell(self, listen: Listen) -> bool:
        """Hand news over; returns whether nothing more is wanted, though the stream goes on."""
        dispatched_at = PolicyVersion.from_proto(self._assignment.dispatch_version)
        news: dict[int, tuple[Sequence[int], Sequence[float]]] = {}
        for index, segment in self.segments.items():
            told, trusted = self._told[index], segment.trusted_count(dispatched_at)
            if index not in self._stopped and trusted > told:
                news[index] = segment.token_ids[told:trusted], segment.logprobs[told:trusted]
        ends = await listen(news) if news else {}
        for index in news:
            if index in ends:
                self.segments[index].stop_at(self._told[index] + ends[index])
                self._stopped.add(index)
            self._told[index] += len(news[index][0])
        return bool(self._stopped) and all(segment.finish_reason for segment in self.segments.values())

    async def _prefill(self, prompt: prefill_pb2.Prompt, worker: routing_pb2.WorkerRef) -> prefill_pb2.PrefillResponse:
        request = prefill_pb2.PrefillRequest(
            request_id=self.request_id,
            worker_epoch=worker.epoch,
            min_policy_version=self._assignment.dispatch_version,
            salt=self._assignment.salt,
            prompt=prompt,
            capture_routes=self._assignment.purpose == TRAINING,
            first_route_position=self._first_route_position,
        )
        async with self._inference.watch.asking(worker):
            return await self._peers.prefill(worker.address).Prefill(request, timeout=self._inference.prefill_timeout_s)

    def _decode_request(self, prompt: prefill_pb2.Prompt, kv: prefill_pb2.KvHandle | None) -> decode_pb2.DecodeRequest:
        assignment = self._assignment
        assert self.placement is not None
        training = assignment.purpose == TRAINING
        request = decode_pb2.DecodeRequest(
            request_id=self.request_id,
            worker_epoch=self.placement.decode.epoch,
            min_policy_version=assignment.dispatch_version,
            salt=assignment.salt,
            prompt=prompt,
            kv=kv,
            sample_ids=[f"{attempt_name(assignment)}.{index}{self._suffix}" for index in self._rollouts],
            sampling=assignment.sampling,
            capture_routes=training,
            first_route_position=self._first_route_position,
            for_training=training,
            sample_indexes=[self._wish.draws.get(index, index) for index in self._rollouts],
        )
        if self._wish.seed is not None:
            request.sampling.seed = self._wish.seed
        if self._wish.listen is not None:
            request.flush.max_ms = FLUSH_MS
        elif self._spares is not None:
            request.flush.max_ms = SPARES_FLUSH_MS
        request.sampling.max_new_tokens = self._max_new_tokens
        return request

    def _check_ended(self) -> None:
        segments = [segment for index, segment in self.segments.items() if not self._given_up(index)]
        if any(segment.finish_reason == ABORTED for segment in segments):
            raise errors.RequestAborted("the decode worker aborted a sample that nobody here gave up")
        if not all(segment.finish_reason for segment in segments):
            raise errors.Unreachable("the decode stream ended before all of its samples")

    def _settle(self, gone: bool) -> list[types_pb2.RowsRef]:
        """Hand what came to the rollouts; returns references that none of them took. `gone`: the decode worker is.

        Where nothing came, nothing is kept: the next request is as this one.
        """
        self._add_timings()
        references = self._references()
        dispatched_at = PolicyVersion.from_proto(self._assignment.dispatch_version)
        untrusted = sum(segment.cut_untrusted(dispatched_at) for segment in self.segments.values())
        if untrusted:
            telemetry.untrusted_tokens.inc(untrusted)
            log.warning("tokens_not_trusted", request_id=self.request_id, token_count=untrusted)
        if not self.delivered:
            return references
        first = next(iter(self._rollouts.values()))
        first.cached_token_count += self._cached_token_count
        first.prefix_query_token_count += len(self._token_ids) - 1
        lost = gone and not self._prefilling  # the rows of the prompt went with it
        for index, segment in self.segments.items():
            if self._spares is not None and self._given_up(index):
                self._spares.token_count += len(segment.token_ids)
                continue
            prompt_routes = None if lost and not segment.finish_reason else self._prompt_routes
            self._rollouts[index].take(segment, prompt_routes, self._assignment.sampling)
        taken = {(ref.holder, ref.key) for rollout in self._rollouts.values() for ref in rollout.routes}
        return [ref for ref in references if (ref.holder, ref.key) not in taken]

    def _add_timings(self) -> None:
        now_s = time.monotonic()
        for index, segment in self.segments.items():
            timings = self._rollouts[index].timings
            timings.add(self._timings)
            if self._decoding:
                ended_s = now_s if segment.ended_s is None else segment.ended_s
                timings.decode_s += ended_s - self._decoding_since_s

    def _trace_decodes(self) -> None:
        """Of a turn of several: each one's decode in its own trace, which ends when its sample does."""
        if not self._decoding or self.placement is None:
            return
        now_s, unix_s = time.monotonic(), tracing.now_s()
        for index, (rollout_id, turn) in self._shared.items():
            segment = self.segments[index]
            ended_s = now_s if segment.ended_s is None else segment.ended_s
            moments = (unix_s - (now_s - each_s) for each_s in (self._decoding_since_s, ended_s))
            said = {"replica": self.placement.decode.replica, "tokens": len(segment.token_ids)}
            tracing.record_between("decode", turn, *moments, rollout=rollout_id, **said)

    def _references(self) -> list[types_pb2.RowsRef]:
        candidates = [self._prompt_routes, *(segment.routes for segment in self.segments.values())]
        return [ref for ref in candidates if ref is not None]

    async def _abort_whole(self) -> None:
        """`_abort` to its end, also where the caller is cancelled at it, or again: by another deadline that is over, or
        with its group. Whoever cancels takes the blocks for free afterwards.
        """
        aborting = asyncio.ensure_future(self._abort())
        cancelled = False
        while not aborting.done():
            try:
                await asyncio.wait([aborting])
            except asyncio.CancelledError:
                cancelled = True
        aborting.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _abort(self) -> None:
        """End what is left at the workers and wait until their blocks are free.

        A worker that is gone has none; one that stands still ends what it computed for us when it goes on, since that
        call is cancelled, and what it held expires.
        """
        if self.placement is None:
            return
        aborts: list[tuple[routing_pb2.WorkerRef, Awaitable[object]]] = []
        if self._decoding and not self._ended_early:
            worker = self.placement.decode
            aborts.append((worker, self._abort_decode(worker)))
        if self._prefilling:
            worker = self.placement.prefill
            abort = prefill_pb2.PrefillServiceAbortRequest(request_id=self.request_id, worker_epoch=worker.epoch)
            aborts.append((worker, self._peers.prefill(worker.address).Abort(abort, timeout=ABORT_TIMEOUT_S)))
        for worker, abort in aborts:
            try:
                with errors.rpc_errors():
                    async with self._inference.watch.asking(worker):
                        await abort
            except errors.SlipstreamError as error:
                log.info("abort_unanswered", request_id=self.request_id, replica=worker.replica, reason=error.reason)
