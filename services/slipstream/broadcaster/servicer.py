"""BroadcastService: RPC to store and back."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import structlog

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.broadcaster import telemetry
from slipstream.broadcaster.publications import Publications
from slipstream.broadcaster.store import Extent, VersionStore, skip_bytes
from slipstream.common.disk import full_disk_named
from slipstream.common.errors import InvalidRequest, SlipstreamError, Unsupported, WeightsCorrupt
from slipstream.common.frames import (
    FRAME_BYTES,
    encode_data,
    encode_header,
    iter_data,
    raw_requests,
    read_header,
    skip_rest,
)
from slipstream.common.version import PolicyVersion
from slipstream.weights.adapter import Adapter, name_end
from slipstream.weights.config import TRANSPORTS
from slipstream.weights.manifest import Probe, WeightSlice, fits

log = structlog.get_logger()

SOURCE = re.compile(rf"({'|'.join(TRANSPORTS[1:])})://[^/\s]+:\d{{1,5}}")
"""Where bytes can be that are not here: `Source.address`."""
REFUSED_SHARD_TIMEOUT_S = 10.0
"""How long the rest of a refused shard is read and dropped, in seconds."""


class BroadcastServicer(broadcast_pb2_grpc.BroadcastServiceServicer):
    """Serves BroadcastService over one store."""

    def __init__(self, store: VersionStore, publications: Publications) -> None:
        self._store = store
        self._publications = publications

    async def OpenVersion(
        self, request: broadcast_pb2.OpenVersionRequest, context: grpc.aio.ServicerContext
    ) -> broadcast_pb2.OpenVersionResponse:
        self._store.open(PolicyVersion.from_proto(request.version), request.rank_count)
        return broadcast_pb2.OpenVersionResponse()

    @raw_requests
    async def PublishShard(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> broadcast_pb2.PublishShardResponse:
        messages = aiter(request_iterator)
        try:
            size_bytes = await self._take_shard(messages)
        except (SlipstreamError, OSError):
            await skip_rest(messages, REFUSED_SHARD_TIMEOUT_S)
            raise
        return broadcast_pb2.PublishShardResponse(size_bytes=size_bytes)

    async def _take_shard(self, messages: AsyncIterator[bytes]) -> int:
        header = await read_header(messages, broadcast_pb2.ShardHeader)
        version = PolicyVersion.from_proto(header.version)
        slices = [WeightSlice.from_proto(part) for part in header.slices]
        for index, part in enumerate(slices):
            if not part.size_bytes:
                raise InvalidRequest("a slice is empty", field=f"slices[{index}].size_bytes", limit=1)
            if not fits(part):
                raise InvalidRequest("a slice is no box of its tensor", field=f"slices[{index}].shape", slice=part.name)
        if header.source:
            if not SOURCE.fullmatch(header.source):
                raise InvalidRequest("no transport://host:port", field="source")
            async for _ in iter_data(messages):
                raise Unsupported("bytes follow a source", source=header.source)
            self._store.put_source(version, header.rank, slices, header.source)
            return sum(part.size_bytes for part in slices)
        writer = self._store.begin_shard(version, header.rank, slices)
        try:
            async for data in iter_data(messages):
                await asyncio.to_thread(writer.write, data)
            await asyncio.to_thread(writer.finish)
            self._store.commit_shard(version, header.rank, writer)
        except BaseException:
            self._store.drop_shard(writer)
            raise
        return writer.size_bytes

    async def SealVersion(
        self, request: broadcast_pb2.SealVersionRequest, context: grpc.aio.ServicerContext
    ) -> broadcast_pb2.SealVersionResponse:
        version = PolicyVersion.from_proto(request.version)
        probe = Probe.from_proto(request.probe) if request.HasField("probe") else None
        if probe is not None and len(probe.logprobs) != len(probe.token_ids) - 1:
            raise InvalidRequest("one log-probability for each token but the first", field="probe.logprobs")
        adapter = Adapter.from_proto(request.adapter) if request.HasField("adapter") else None
        if adapter is not None and not adapter.name.endswith(name_end(version)):
            raise InvalidRequest(f"the name must end in {name_end(version)!r}", field="adapter.name")
        manifest = self._store.seal(version, probe, adapter)
        self._publications.announce()
        log.info("version_sealed", policy_version=str(version), size_bytes=manifest.size_bytes)
        return broadcast_pb2.SealVersionResponse(manifest=manifest.to_proto())

    async def GetManifest(
        self, request: broadcast_pb2.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> broadcast_pb2.GetManifestResponse:
        version = PolicyVersion.from_proto(request.version) or None
        return broadcast_pb2.GetManifestResponse(manifest=self._store.manifest(version).to_proto())

    async def WatchVersions(
        self, request: broadcast_pb2.WatchVersionsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[broadcast_pb2.WatchVersionsResponse]:
        async for version in self._publications.follow(PolicyVersion.from_proto(request.after)):
            yield broadcast_pb2.WatchVersionsResponse(version=version.to_proto())

    async def FetchSlices(
        self, request: broadcast_pb2.FetchSlicesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        version = PolicyVersion.from_proto(request.version)
        extents = self._store.extents(version, request.slice_indexes)
        rest = skip_bytes(extents, request.offset_bytes)
        size_bytes = sum(part.size_bytes for part in extents)
        with self._store.reading(version):
            yield encode_header(broadcast_pb2.SlicesHeader(version=request.version, size_bytes=size_bytes))
            for part in rest:
                async for data in _read(part):
                    yield encode_data(data)
                    telemetry.sent_bytes.inc(len(data))


async def _read(extent: Extent) -> AsyncIterator[bytes]:
    """The bytes of an extent, a frame's worth at a time. No file stays open while the client takes its time."""
    at, end = extent.offset_bytes, extent.offset_bytes + extent.size_bytes
    while at < end:
        data = await asyncio.to_thread(_read_at, extent.path, at, min(FRAME_BYTES, end - at))
        at += len(data)
        yield data


def _read_at(path: Path, at: int, size_bytes: int) -> bytes:
    try:
        with full_disk_named(path), path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), size_bytes, at)
    except OSError as error:
        raise WeightsCorrupt(f"{path.name} cannot be read: {error.strerror}", file=path.name) from error
    if not data:
        raise WeightsCorrupt(f"{path.name} is cut short", file=path.name)
    return data
