"""DecodeService: RPC to engine and back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc

from slipstream.api.inference.v1 import decode_pb2, decode_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import RequestIdReused, SlipstreamError
from slipstream.decode.kv_client import KvClient
from slipstream.engine.base import FRAMES, DecodeRequest, Engine, KvReference, SampleChunk
from slipstream.engine.checks import require_transport
from slipstream.engine.worker.gate import WorkerGate
from slipstream.engine.worker.prompts import chunk_to_proto, prompt_tokens, sampling_from_proto
from slipstream.engine.worker.rows import RowsHolder
from slipstream.engine.worker.worker import Servicer, Worker

DEFAULT_FLUSH_S = 1.0
EARLY = 0.9


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService."""

    def __init__(self, engine: Engine, gate: WorkerGate, routes: RowsHolder, kv: KvClient) -> None:
        self._engine = engine
        self._gate = gate
        self._routes = routes
        self._kv = kv
        self._fetching: dict[str, bool] = {}
        """Requests whose KV is on its way: whether they were aborted meanwhile."""

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        with self._gate.admitted(request.worker_epoch, request.min_policy_version, request.salt):
            job = await self._with_kv(request)
            if job is None:
                yield _all_aborted(len(request.sample_ids))
                return
            flush_s = request.flush.max_ms / 1000 or DEFAULT_FLUSH_S
            joined = JoinedChunks(len(request.sample_ids), 0.0 if request.flush.max_tokens else flush_s)
            prompt = PromptRoutes(self._routes, job)
            try:
                # Closing the iterator, because the caller left or is out of time, aborts the request.
                async with aclosing(self._engine.decode_batches(job, flush_s)) as batches:
                    async for chunks in batches:
                        ready = joined.add(chunks)
                        if ready:
                            news = [self._to_proto(job, chunk) for chunk in ready]
                            yield prompt.told(decode_pb2.DecodeResponse(chunks=news))
            except SlipstreamError:  # the caller goes on elsewhere from what there is
                if left := joined.take():
                    yield prompt.told(decode_pb2.DecodeResponse(chunks=[self._to_proto(job, c) for c in left]))
                raise
            finally:
                if isinstance(job.kv, KvReference):  # its blocks went with its transfer, unless there was none
                    self._kv.release(request.kv)
            rest = joined.take()
            if rest:
                yield prompt.told(decode_pb2.DecodeResponse(chunks=[self._to_proto(job, c) for c in rest]))

    async def Abort(
        self, request: decode_pb2.DecodeServiceAbortRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.DecodeServiceAbortResponse:
        self._gate.check_epoch(request.worker_epoch)
        if request.request_id in self._fetching:  # it has no blocks yet, and will not ask for any
            self._fetching[request.request_id] = True
            return decode_pb2.DecodeServiceAbortResponse(found=True)
        ended = await self._engine.abort(request.request_id)
        return decode_pb2.DecodeServiceAbortResponse(found=ended > 0)

    async def _with_kv(self, request: decode_pb2.DecodeRequest) -> DecodeRequest | None:
        """The request with its KV here; None if it was aborted meanwhile."""
        job = DecodeRequest(
            request.request_id,
            prompt_tokens(request.prompt),
            request.salt,
            tuple(request.sample_ids),
            sampling_from_proto(request.sampling),
            None,
            request.capture_routes,
            request.first_route_position,
            request.for_training,
            tuple(request.sample_indexes),
        )
        self._engine.check(job)  # before its KV is pulled
        if request.HasField("kv"):
            require_transport(self._engine.capabilities, request.kv.transport or FRAMES)
            if request.request_id in self._fetching:
                raise RequestIdReused("this request is running", request_id=request.request_id)
            self._fetching[request.request_id] = False
            try:
                job = replace(job, kv=await self._kv.resolve(request.kv))
            finally:
                aborted = self._fetching.pop(request.request_id)
            if aborted:
                if isinstance(job.kv, KvReference):
                    self._kv.release(request.kv)
                return None
        return job

    def _to_proto(self, job: DecodeRequest, chunk: SampleChunk) -> decode_pb2.SampleChunk:
        last = bool(chunk.finish_reason) and job.capture_routes
        return chunk_to_proto(chunk, self._routes.ref(job.sample_ids[chunk.sample_index]) if last else None)


class PromptRoutes:
    """Says once, as soon as they are known, where the routes of a prompt are that was computed here."""

    def __init__(self, routes: RowsHolder, job: DecodeRequest) -> None:
        self._routes = routes
        self._request_id = job.request_id
        self._due = job.kv is None and job.capture_routes and len(job.token_ids) > 1

    def told(self, response: decode_pb2.DecodeResponse) -> decode_pb2.DecodeResponse:
        if self._due and (ref := self._routes.ref(self._request_id)) is not None:
            response.prompt_routes.CopyFrom(ref)
            self._due = False
        return response


class JoinedChunks:
    """Joins chunks into few messages: all samples are done, or the last message is about `flush_s` old."""

    def __init__(self, sample_count: int, flush_s: float) -> None:
        self._left = sample_count
        self._pause_s = flush_s * EARLY  # the engine's own clock says when: its news must not wait for the next
        self._chunks: list[SampleChunk] = []
        self._sent_s = time.monotonic()

    def add(self, chunks: list[SampleChunk]) -> list[SampleChunk]:
        """Take chunks in; returns what is to be sent now."""
        self._chunks += chunks
        self._left -= sum(bool(chunk.finish_reason) for chunk in chunks)
        return self.take() if self._left <= 0 or time.monotonic() - self._sent_s >= self._pause_s else []

    def take(self) -> list[SampleChunk]:
        chunks, self._chunks = self._chunks, []
        self._sent_s = time.monotonic()
        return chunks


def _all_aborted(sample_count: int) -> decode_pb2.DecodeResponse:
    chunks = [
        decode_pb2.SampleChunk(sample_index=index, finish_reason=types_pb2.FINISH_REASON_ABORTED)
        for index in range(sample_count)
    ]
    return decode_pb2.DecodeResponse(chunks=chunks)


def decode_servicers(worker: Worker, kv: KvClient) -> list[Servicer]:
    """What a decode worker serves beside what every worker does."""
    servicer = DecodeServicer(worker.engine, worker.gate, worker.routes, kv)
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    return [(add, servicer, "slipstream.api.inference.v1.DecodeService")]
