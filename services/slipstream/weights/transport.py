"""How weights travel: the protocol, and its gRPC backend through the broadcaster.

The publisher's side is the trainer's, the fetcher's the workers'. Both calls may be repeated: a version that is sealed
with the same weights counts as published, and a fetch holds nothing but its buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import grpc
import numpy as np
import structlog

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.common.errors import (
    DeadlineExceeded,
    FrameInvalid,
    TooManyFiles,
    Unreachable,
    VersionSealed,
    WeightsCorrupt,
    from_rpc_error,
)
from slipstream.common.frames import (
    encode_header,
    iter_data,
    iter_frames,
    raw_responses,
    raw_stream_unary,
    raw_unary_stream,
    read_header,
)
from slipstream.common.version import PolicyVersion
from slipstream.weights.adapter import Adapter
from slipstream.weights.manifest import Manifest, Probe, WeightSlice, assemble, check_geometry, describe_tensors

log = structlog.get_logger()

_SERVICE = "/slipstream.api.broadcast.v1.BroadcastService"
_RETRIED = (Unreachable, DeadlineExceeded, FrameInvalid, TooManyFiles)
"""A broken stream goes on from its offset; everything else is final."""
RETRY_PAUSE_S = 0.1
MAX_ATTEMPTS = 5
"""In a row without a byte of progress."""


class WeightTransport(Protocol):
    """Moves the weights of one version from where they are trained to where they serve."""

    async def publish(
        self, version: PolicyVersion, tensors: Mapping[str, np.ndarray], probe: Probe, adapter: Adapter | None = None
    ) -> Manifest:
        """Publish and seal a version of whole tensors by Hugging Face name. A repeat answers the same.

        `adapter`: among them are the halves of one.
        """
        ...

    async def open_version(self, version: PolicyVersion, rank_count: int = 1) -> None:
        """Begin a version of several ranks, or begin it again without what was published of it."""
        ...

    async def publish_shard(
        self,
        version: PolicyVersion,
        slices: tuple[WeightSlice, ...],
        buffers: list[memoryview],
        rank: int = 0,
        source: str = "",
    ) -> int:
        """Publish what one rank has of an open version, its bytes in the order of the slices. A repeat replaces it.

        `source`: where they are, if none are given.
        """
        ...

    async def publish_slices(
        self,
        version: PolicyVersion,
        slices: tuple[WeightSlice, ...],
        buffers: list[memoryview],
        probe: Probe,
        adapter: Adapter | None = None,
        source: str = "",
    ) -> Manifest:
        """Publish and seal a version of one rank that is described already. A repeat answers the same."""
        ...

    async def seal_version(self, version: PolicyVersion, probe: Probe, adapter: Adapter | None = None) -> Manifest:
        """Make a version visible, once all ranks have published. A repeat answers the same."""
        ...

    async def manifest(self, version: PolicyVersion | None = None) -> Manifest:
        """The manifest of a sealed version, the newest by default."""
        ...

    def watch(self, after: PolicyVersion | None = None) -> AsyncIterator[PolicyVersion]:
        """Versions above `after` as they are sealed, the newest first; some may be skipped. Ends with an error."""
        ...

    async def fetch(self, manifest: Manifest) -> dict[str, np.ndarray]:
        """The tensors of a version. Raises `WeightsCorrupt` when bytes do not match the manifest."""
        ...


@dataclass
class _Download:
    """The bytes of a version as they come."""

    data: bytearray
    held: int = 0

    @property
    def done(self) -> bool:
        return self.held == len(self.data)

    def take(self, frame: memoryview) -> None:
        if self.held + len(frame) > len(self.data):
            raise WeightsCorrupt(f"more than the announced {len(self.data)} bytes came")
        self.data[self.held : self.held + len(frame)] = frame
        self.held += len(frame)


class GrpcWeightTransport:
    """Bytes go through the broadcaster in frames: for CPUs and wide-area networks."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float = 60.0) -> None:
        self._stub = broadcast_pb2_grpc.BroadcastServiceStub(channel)
        self._publish_shard = raw_stream_unary(channel, f"{_SERVICE}/PublishShard", broadcast_pb2.PublishShardResponse)
        self._fetch_slices = raw_unary_stream(channel, f"{_SERVICE}/FetchSlices")
        self._timeout_s = timeout_s

    async def publish(
        self, version: PolicyVersion, tensors: Mapping[str, np.ndarray], probe: Probe, adapter: Adapter | None = None
    ) -> Manifest:
        slices, buffers = describe_tensors(tensors)
        return await self.publish_slices(version, slices, buffers, probe, adapter)

    async def publish_slices(
        self,
        version: PolicyVersion,
        slices: tuple[WeightSlice, ...],
        buffers: list[memoryview],
        probe: Probe,
        adapter: Adapter | None = None,
        source: str = "",
    ) -> Manifest:
        try:
            await self.open_version(version)
            await self.publish_shard(version, slices, buffers, source=source)
        except VersionSealed:
            there = await self.manifest(version)
            if there.slices != slices:
                raise
            return there
        return await self.seal_version(version, probe, adapter)

    async def open_version(self, version: PolicyVersion, rank_count: int = 1) -> None:
        request = broadcast_pb2.OpenVersionRequest(
            request_id=uuid4().hex, version=version.to_proto(), rank_count=rank_count
        )
        await self._call(self._stub.OpenVersion, request)

    async def publish_shard(
        self,
        version: PolicyVersion,
        slices: tuple[WeightSlice, ...],
        buffers: list[memoryview],
        rank: int = 0,
        source: str = "",
    ) -> int:
        """Send one rank's slices, their bytes in the same order."""
        header = broadcast_pb2.ShardHeader(
            version=version.to_proto(), rank=rank, slices=[part.to_proto() for part in slices], source=source
        )

        async def messages() -> AsyncIterator[bytes]:
            yield encode_header(header)
            for frame in iter_frames(buffers):
                yield frame

        response: broadcast_pb2.PublishShardResponse = await self._call(self._publish_shard, messages())
        return response.size_bytes

    async def seal_version(self, version: PolicyVersion, probe: Probe, adapter: Adapter | None = None) -> Manifest:
        request = broadcast_pb2.SealVersionRequest(
            request_id=uuid4().hex,
            version=version.to_proto(),
            probe=probe.to_proto(),
            adapter=None if adapter is None else adapter.to_proto(),
        )
        return Manifest.from_proto((await self._call(self._stub.SealVersion, request)).manifest)

    async def manifest(self, version: PolicyVersion | None = None) -> Manifest:
        request = broadcast_pb2.GetManifestRequest(version=None if version is None else version.to_proto())
        return Manifest.from_proto((await self._call(self._stub.GetManifest, request)).manifest)

    async def watch(self, after: PolicyVersion | None = None) -> AsyncIterator[PolicyVersion]:
        request = broadcast_pb2.WatchVersionsRequest(after=None if after is None else after.to_proto())
        try:
            async for message in self._stub.WatchVersions(request):
                yield PolicyVersion.from_proto(message.version)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise Unreachable("the broadcaster ended the stream")

    async def fetch(self, manifest: Manifest) -> dict[str, np.ndarray]:
        check_geometry(manifest.slices)
        download = _Download(bytearray(manifest.size_bytes))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._fill(manifest, download)
        except TimeoutError:
            raise DeadlineExceeded(f"weights {manifest.version} did not come in {self._timeout_s} s") from None
        return assemble(manifest, download.data)

    async def _fill(self, manifest: Manifest, download: _Download) -> None:
        failures = 0
        while not download.done:
            before = download.held
            try:
                await self._receive(manifest, download)
            except _RETRIED as error:
                failures = 0 if download.held > before else failures + 1
                if failures >= MAX_ATTEMPTS:
                    raise
                log.info("weights_fetch_resumed", offset_bytes=download.held, reason=error.reason)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _receive(self, manifest: Manifest, download: _Download) -> None:
        """Take what one stream gives, from where the last one ended."""
        request = broadcast_pb2.FetchSlicesRequest(version=manifest.version.to_proto(), offset_bytes=download.held)
        call = self._fetch_slices(request, timeout=self._timeout_s)
        try:
            messages = raw_responses(call)
            header = await read_header(messages, broadcast_pb2.SlicesHeader)
            if header.size_bytes != len(download.data):
                raise WeightsCorrupt(f"{header.size_bytes} bytes announced, not {len(download.data)}")
            async for frame in iter_data(messages):
                download.take(frame)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        if not download.done:
            raise FrameInvalid("the stream ended early", held_bytes=download.held, size_bytes=len(download.data))

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
