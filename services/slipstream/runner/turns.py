"""The inference client: one model turn of a group, through router, prefill and decode.

    Place -> Prefill (KV stays at the worker) -> Decode (pulls the KV, streams samples) -> Release

The router leaves Prefill out where the decode worker may compute the prompt itself.

A turn that fails at a worker is placed again, away from that worker, within the group's deadline; so is one whose
prefill worker stands still, as soon as the router knows. Retries live here and nowhere else on this path.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.routing.v1 import routing_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import errors
from slipstream.engine.hashing import block_hashes
from slipstream.runner import telemetry
from slipstream.runner.peers import Peers
from slipstream.runner.watch import WorkerWatch

log = structlog.get_logger()

PLACE_AGAIN = (
    errors.WorkerStale,
    errors.NoWeights,
    errors.Draining,
    errors.RequestAborted,
    errors.KvTransferFailed,
    errors.KvUnknown,
    errors.KvMismatch,
    errors.NoWorker,
    errors.PoolSaturated,
    errors.StateUnavailable,
    errors.EngineFull,
    errors.Unreachable,
    errors.DeadlineExceeded,
)
"""What another placement may heal."""
PREFILL_AT_FAULT = (errors.KvTransferFailed, errors.KvUnknown, errors.KvMismatch)
"""What a decode worker says of the prefill worker."""
TRAINING = runner_pb2.GROUP_PURPOSE_TRAINING
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
ABORT_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 30.0


def attempt_name(assignment: runner_pb2.GroupAssignment) -> str:
    """What this attempt is called at router, workers and spool.

    The incarnation is part of it: a position that is run again after a restore of the trainer may have the number of an
    attempt of the dead one, whose KV handles, routes and rows are kept under that name, and a first write wins.
    """
    return f"{assignment.group_id}.{assignment.dispatch_version.incarnation}.{assignment.attempt}"


@dataclass
class Sample:
    """One sampled answer, as it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[types_pb2.VersionSpan] = field(default_factory=list)
    finish_reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_UNSPECIFIED
    routes: types_pb2.RowsRef | None = None

    def extend(self, chunk: decode_pb2.SampleChunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        for span in chunk.spans:
            self._extend_spans(span)
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            if chunk.HasField("routes"):
                self.routes = chunk.routes

    def _extend_spans(self, span: types_pb2.VersionSpan) -> None:
        """Chunks are cut by time; a span that only goes on is the same span."""
        last = self.spans[-1] if self.spans else None
        if last is None or (last.version, last.kv_oldest_version) != (span.version, span.kv_oldest_version):
            self.spans.append(span)
        else:
            last.token_count += span.token_count


@dataclass
class Turn:
    """What came of one model turn of a group."""

    samples: list[Sample]
    prompt_routes: types_pb2.RowsRef | None = None
    cached_token_count: int = 0
    """Prompt tokens that the worker which computed the prompt had in its prefix cache."""

    def extend(self, message: decode_pb2.DecodeResponse, *, computed_there: bool) -> None:
        """Take in news of a decode worker. `computed_there`: it computed the prompt, too."""
        for chunk in message.chunks:
            self.samples[chunk.sample_index].extend(chunk)
            if computed_there:
                self.cached_token_count = max(self.cached_token_count, chunk.cached_token_count)
        if message.HasField("prompt_routes"):
            self.prompt_routes = message.prompt_routes


@dataclass
class TurnAttempt:
    """Where an attempt at a turn has got to: what must be given back when it ends early."""

    request_id: str
    first_route_position: int = 0
    placement: routing_pb2.PlaceResponse | None = None
    prefilling: bool = False
    decoding: bool = False
    routes: list[types_pb2.RowsRef] = field(default_factory=list)

    def failed_replica(self, error: errors.SlipstreamError) -> str:
        """Which of its workers to avoid from now on."""
        assert self.placement is not None
        if self.prefilling and (not self.decoding or isinstance(error, PREFILL_AT_FAULT)):
            return self.placement.prefill.replica
        return self.placement.decode.replica


class TurnClient:
    """Runs model turns. One a runner; safe to use from many tasks."""

    def __init__(self, peers: Peers, watch: WorkerWatch, block_size_tokens: int, prefill_timeout_s: float) -> None:
        self._peers = peers
        self._watch = watch
        self._block_size_tokens = block_size_tokens
        self._prefill_timeout_s = prefill_timeout_s

    async def run(
        self,
        assignment: runner_pb2.GroupAssignment,
        token_ids: Sequence[int],
        deadline_s: float,
        first_route_position: int = 0,
    ) -> Turn:
        """Sample `sample_count` answers to the prompt `token_ids`.

        `deadline_s` is in `time.monotonic()` terms. The rows of positions below `first_route_position` are known from
        earlier turns, and move no second time. Cancelling the task aborts the request at both
        workers and returns only when their blocks are free.

        Raises:
            DeadlineExceeded: no placement brought it to an end in time.
            SlipstreamError: what no other placement can heal.
        """
        hashes = block_hashes(assignment.salt, token_ids[:-1], self._block_size_tokens)
        avoid: list[str] = []
        backoff_s = FIRST_BACKOFF_S
        retry = 0
        while True:
            name = attempt_name(assignment) + (f"~{retry}" if retry else "")
            attempt = TurnAttempt(name, first_route_position)
            try:
                async with asyncio.timeout(max(deadline_s - time.monotonic(), 0)):
                    return await self._once(assignment, token_ids, hashes, avoid, attempt)
            except TimeoutError as error:
                raise errors.DeadlineExceeded("the turn did not end before the group's deadline") from error
            except PLACE_AGAIN as error:
                log.info("turn_placed_again", request_id=attempt.request_id, reason=error.reason, retry=retry)
                if attempt.placement is not None:
                    avoid = [attempt.failed_replica(error)]
            retry += 1
            pause_s = backoff_s * (0.5 + random.random())
            if time.monotonic() + pause_s >= deadline_s:
                raise errors.DeadlineExceeded(f"{retry} placements failed before the group's deadline")
            await asyncio.sleep(pause_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _once(
        self,
        assignment: runner_pb2.GroupAssignment,
        token_ids: Sequence[int],
        hashes: Sequence[int],
        avoid: list[str],
        attempt: TurnAttempt,
    ) -> Turn:
        outcome = "given_up"
        try:
            turn = await self._place_prefill_decode(assignment, token_ids, hashes, avoid, attempt)
            outcome = "finished"
            return turn
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            telemetry.turns.labels(outcome).inc()
            if outcome != "finished":
                await self._give_back(attempt)
            if attempt.placement is not None:
                self._peers.release_placement(attempt.placement.placement_id)

    async def _place_prefill_decode(
        self,
        assignment: runner_pb2.GroupAssignment,
        token_ids: Sequence[int],
        hashes: Sequence[int],
        avoid: list[str],
        attempt: TurnAttempt,
    ) -> Turn:
        attempt.placement = placement = await self._peers.router.Place(
            routing_pb2.PlaceRequest(
                request_id=attempt.request_id,
                group_id=assignment.group_id,
                block_hashes=hashes,
                prompt_token_count=len(token_ids),
                sample_count=assignment.sample_count,
                max_new_tokens=assignment.sampling.max_new_tokens,
                min_policy_version=assignment.dispatch_version,
                avoid_replicas=avoid,
            ),
            timeout=PLACE_TIMEOUT_S,
        )
        prompt = prefill_pb2.Prompt(new_token_ids=token_ids)
        turn = Turn([Sample() for _ in range(assignment.sample_count)])
        kv: prefill_pb2.KvHandle | None = None
        if placement.HasField("prefill"):
            attempt.prefilling = True
            prefilled = await self._prefill(assignment, prompt, attempt, placement.prefill)
            kv = prefilled.kv if prefilled.HasField("kv") else None
            turn.cached_token_count = prefilled.cached_token_count
            if prefilled.HasField("routes"):
                turn.prompt_routes = prefilled.routes
                attempt.routes.append(prefilled.routes)
        attempt.decoding = True
        prefix = f"{attempt_name(assignment)}."
        suffix = attempt.request_id.partition("~")[2]
        stream = self._peers.decode(placement.decode.address).Decode(
            decode_pb2.DecodeRequest(
                request_id=attempt.request_id,
                worker_epoch=placement.decode.epoch,
                min_policy_version=assignment.dispatch_version,
                salt=assignment.salt,
                prompt=prompt,
                kv=kv,
                sample_ids=[
                    f"{prefix}{index}" + (f"~{suffix}" if suffix else "") for index in range(len(turn.samples))
                ],
                sampling=assignment.sampling,
                capture_routes=assignment.purpose == TRAINING,
                first_route_position=attempt.first_route_position,
                for_training=assignment.purpose == TRAINING,
            )
        )
        async for message in stream:
            turn.extend(message, computed_there=not placement.HasField("prefill"))
            attempt.routes.extend(chunk.routes for chunk in message.chunks if chunk.HasField("routes"))
            if message.HasField("prompt_routes"):
                attempt.routes.append(message.prompt_routes)
        if any(sample.finish_reason == types_pb2.FINISH_REASON_ABORTED for sample in turn.samples):
            raise errors.RequestAborted("the decode worker aborted a sample that nobody here gave up")
        if not all(sample.finish_reason for sample in turn.samples):
            raise errors.Unreachable("the decode stream ended before all of its samples")
        return turn

    async def _prefill(
        self,
        assignment: runner_pb2.GroupAssignment,
        prompt: prefill_pb2.Prompt,
        attempt: TurnAttempt,
        worker: routing_pb2.WorkerRef,
    ) -> prefill_pb2.PrefillResponse:
        request = prefill_pb2.PrefillRequest(
            request_id=attempt.request_id,
            worker_epoch=worker.epoch,
            min_policy_version=assignment.dispatch_version,
            salt=assignment.salt,
            prompt=prompt,
            capture_routes=assignment.purpose == TRAINING,
            first_route_position=attempt.first_route_position,
        )
        async with self._watch.asking(worker):
            return await self._peers.prefill(worker.address).Prefill(request, timeout=self._prefill_timeout_s)

    async def _give_back(self, attempt: TurnAttempt) -> None:
        """Abort at the workers and wait until their blocks are free.

        A worker that is gone has none; one that stands still ends what it computed for us when it goes on, since that
        call is cancelled, and what it held expires.
        """
        self._peers.release_routes(attempt.routes)
        if attempt.placement is None:
            return
        request_id = attempt.request_id
        aborts: list[tuple[routing_pb2.WorkerRef, Awaitable[object]]] = []
        if attempt.decoding:
            worker = attempt.placement.decode
            abort = decode_pb2.DecodeServiceAbortRequest(request_id=request_id, worker_epoch=worker.epoch)
            aborts.append((worker, self._peers.decode(worker.address).Abort(abort, timeout=ABORT_TIMEOUT_S)))
        if attempt.prefilling:
            worker = attempt.placement.prefill
            abort = prefill_pb2.PrefillServiceAbortRequest(request_id=request_id, worker_epoch=worker.epoch)
            aborts.append((worker, self._peers.prefill(worker.address).Abort(abort, timeout=ABORT_TIMEOUT_S)))
        for worker, abort in aborts:
            try:
                with errors.rpc_errors():
                    async with self._watch.asking(worker):
                        await abort
            except errors.SlipstreamError as error:
                log.info("abort_unanswered", request_id=request_id, replica=worker.replica, reason=error.reason)
