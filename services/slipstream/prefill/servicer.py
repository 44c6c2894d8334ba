"""PrefillService and KvService: RPC to engine and back."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator

import grpc

from slipstream.api.inference.v1 import prefill_pb2, prefill_pb2_grpc
from slipstream.common.errors import KvMismatch, KvUnknown, OffsetOutOfRange
from slipstream.common.frames import encode_header, iter_frames
from slipstream.engine.base import FRAMES, Engine, PrefillRequest
from slipstream.engine.worker import telemetry
from slipstream.engine.worker.gate import WorkerGate
from slipstream.engine.worker.identity import WorkerIdentity
from slipstream.engine.worker.prompts import prompt_tokens
from slipstream.engine.worker.rows import RowsHolder
from slipstream.engine.worker.worker import Servicer, Worker


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService. The engine holds the KV and frees it when `kv_ttl_s` is over."""

    def __init__(
        self, identity: WorkerIdentity, engine: Engine, gate: WorkerGate, routes: RowsHolder, kv_ttl_s: float
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._gate = gate
        self._routes = routes
        self._kv_ttl_s = kv_ttl_s

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.PrefillResponse:
        with self._gate.admitted(request.worker_epoch, request.min_policy_version, request.salt):
            token_ids = prompt_tokens(request.prompt)
            if len(token_ids) == 1:  # decode computes the last token: there is nothing to hand over
                return prefill_pb2.PrefillResponse()
            try:
                result = await self._engine.prefill(
                    PrefillRequest(
                        request.request_id,
                        token_ids,
                        request.salt,
                        request.capture_routes,
                        request.first_route_position,
                    )
                )
            except asyncio.CancelledError:  # the caller is gone, or out of time
                await self._engine.abort(request.request_id)
                raise
            expires_s = time.time() + self._kv_ttl_s  # a timer of the engine frees it
            kv = prefill_pb2.KvHandle(
                address=self._identity.address,
                replica=self._identity.replica,
                worker_epoch=self._identity.epoch,
                transfer_id=result.transfer_id,
                token_count=result.token_count,
                expires_unix_ms=round(expires_s * 1000),
                transport=FRAMES,
            )
            if result.reference is not None:
                kv.transport = result.reference.transport
                kv.connector_params = result.reference.params
            return prefill_pb2.PrefillResponse(
                kv=kv,
                version=result.version.to_proto(),
                kv_oldest_version=result.kv_oldest_version.to_proto(),
                cached_token_count=result.cached_token_count,
                routes=self._routes.ref(request.request_id) if request.capture_routes else None,
            )

    async def Abort(
        self, request: prefill_pb2.PrefillServiceAbortRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.PrefillServiceAbortResponse:
        self._gate.check_epoch(request.worker_epoch)
        held = self._engine.release_kv(request.request_id)
        ended = await self._engine.abort(request.request_id)
        return prefill_pb2.PrefillServiceAbortResponse(found=held or ended > 0)


class KvServicer(prefill_pb2_grpc.KvServiceServicer):
    """Serves KvService: the KV of prefills, in frames."""

    def __init__(self, identity: WorkerIdentity, engine: Engine, gate: WorkerGate) -> None:
        self._identity = identity
        self._engine = engine
        self._gate = gate

    async def FetchKv(
        self, request: prefill_pb2.FetchKvRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        handle = request.kv
        self._gate.check_epoch(handle.worker_epoch)
        self._check(handle)
        if handle.transport not in ("", FRAMES):
            yield encode_header(self._lease(handle))
            return
        payload = self._engine.export_kv(handle.transfer_id)
        header, data = payload.header, memoryview(payload.data)
        _check_count(handle, header.token_count)
        if request.offset_bytes > data.nbytes:
            raise OffsetOutOfRange(f"offset beyond {data.nbytes}", size_bytes=data.nbytes)
        message = prefill_pb2.KvHeader(
            dtype=header.dtype,
            shape=header.shape,
            token_count=header.token_count,
            size_bytes=data.nbytes,
            crc32=zlib.crc32(data),
            version=header.version.to_proto(),
            kv_oldest_version=header.oldest_version.to_proto(),
            salt=header.salt,
            prompt_hash=header.prompt_hash,
        )
        yield encode_header(message)
        for frame in iter_frames([data], request.offset_bytes):
            yield frame
        telemetry.kv_sent_bytes.inc(data.nbytes - request.offset_bytes)

    def _check(self, handle: prefill_pb2.KvHandle) -> None:
        """What this worker wrote into the handle, by its own name and clock."""
        if handle.replica not in ("", self._identity.replica):
            raise KvMismatch(f"the handle is of {handle.replica}", field="replica")
        if 0 < handle.expires_unix_ms < time.time() * 1000:
            raise KvUnknown("it has expired", transfer_id=handle.transfer_id)

    def _lease(self, handle: prefill_pb2.KvHandle) -> prefill_pb2.KvHeader:
        reference = self._engine.lease_kv(handle.transfer_id)
        try:
            _check_count(handle, reference.token_count)
            if handle.connector_params != reference.params:
                raise KvMismatch("what the connector is to read is not this KV", field="connector_params")
        except KvMismatch:
            self._engine.release_kv(handle.transfer_id)  # it is leased, and nobody takes it
            raise
        return prefill_pb2.KvHeader(
            token_count=reference.token_count,
            version=reference.version.to_proto(),
            kv_oldest_version=reference.oldest_version.to_proto(),
            lease_ms=round(reference.lease_s * 1000),
            salt=reference.salt,
            prompt_hash=reference.prompt_hash,
            connector_params=reference.params,
        )

    async def ReleaseKv(
        self, request: prefill_pb2.ReleaseKvRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ReleaseKvResponse:
        self._gate.check_epoch(request.worker_epoch)
        released = sum(self._engine.release_kv(transfer_id) for transfer_id in request.transfer_ids)
        return prefill_pb2.ReleaseKvResponse(released_count=released)


def _check_count(handle: prefill_pb2.KvHandle, token_count: int) -> None:
    if handle.token_count not in (0, token_count):
        raise KvMismatch(f"it is of {token_count} tokens, not {handle.token_count}", field="token_count")


def prefill_servicers(worker: Worker, kv_ttl_s: float) -> list[Servicer]:
    """What a prefill worker serves beside what every worker does."""
    prefill = PrefillServicer(worker.identity, worker.engine, worker.gate, worker.routes, kv_ttl_s)
    kv = KvServicer(worker.identity, worker.engine, worker.gate)
    package = "slipstream.api.inference.v1"
    return [
        (prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill, f"{package}.PrefillService"),
        (prefill_pb2_grpc.add_KvServiceServicer_to_server, kv, f"{package}.KvService"),
    ]
