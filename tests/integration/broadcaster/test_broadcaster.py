"""Publish, seal, follow, fetch, prune: over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.broadcaster.config import BroadcasterConfig
from slipstream.broadcaster.publications import Publications
from slipstream.broadcaster.servicer import BroadcastServicer
from slipstream.broadcaster.store import VersionStore
from slipstream.common import errors
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.runtime import build_server
from slipstream.common.state import PUBLISHED, SERVING, State
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.trainer.parallel.board import Board
from slipstream.trainer.parallel.layout import Layout
from slipstream.trainer.parallel.roll import Roll
from slipstream.trainer.publish import RankedPublisher
from slipstream.weights.adapter import Adapter, adapter_name
from slipstream.weights.manifest import Box, Probe, describe_tensors
from slipstream.weights.transport import GrpcWeightTransport

SERVICE = "slipstream.api.broadcast.v1.BroadcastService"
PROBE = Probe((1, 2, 3), (-0.5, -0.25), 0.001)
V = [PolicyVersion(1, step) for step in range(8)]
DEADLINE_S = 30.0
"""For what takes milliseconds where nothing else runs."""


def weights(seed: int, rows: int = 400) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layer.{i}.weight": random.standard_normal((rows, 1000), dtype=np.float32) for i in range(2)}


class SharedState:
    """Redis as the broadcaster sees it; it can be away."""

    def __init__(self) -> None:
        self.versions: dict[str, PolicyVersion] = {}
        self.away = False

    async def advance(self, key: str, version: PolicyVersion) -> bool:
        self._check()
        self.versions[key] = max(version, self.versions.get(key, UNSET))
        return self.versions[key] == version

    async def version(self, key: str) -> PolicyVersion:
        self._check()
        return self.versions.get(key, UNSET)

    def _check(self) -> None:
        if self.away:
            raise errors.StateUnavailable("away")


class Broadcaster:
    """One running broadcaster over a directory; `restart` gives a new one over the same."""

    def __init__(self, config: BroadcasterConfig, state: SharedState) -> None:
        self.config = config
        self.state = state

    async def start(self) -> None:
        self.store = VersionStore(self.config.run_dir / "versions", self.config.max_store_bytes)
        self.publications = Publications(self.store, self.state, self.config.keep_version_count, 60.0)
        servicer = BroadcastServicer(self.store, self.publications)
        add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
        self.server, port = build_server(self.config, [(add, servicer, SERVICE)])
        await self.server.start()
        self.channel = open_channel(f"127.0.0.1:{port}", Access())
        self.transport = GrpcWeightTransport(self.channel, timeout_s=DEADLINE_S)

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(None)

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@pytest.fixture
async def broadcaster(make_config) -> AsyncIterator[Broadcaster]:
    running = Broadcaster(make_config(BroadcasterConfig, max_store_bytes=40_000_000), SharedState())
    await running.start()
    yield running
    await running.stop()


async def test_what_is_published_is_fetched(broadcaster):
    tensors = weights(0)
    manifest = await broadcaster.transport.publish(V[1], tensors, PROBE)
    assert manifest == await broadcaster.transport.manifest()
    assert manifest.probe is not None
    assert manifest.probe.token_ids == PROBE.token_ids
    fetched = await broadcaster.transport.fetch(manifest)
    for name, values in tensors.items():
        np.testing.assert_array_equal(fetched[name], values)


async def test_a_repeated_publication_answers_the_same_and_another_one_is_refused(broadcaster):
    first = await broadcaster.transport.publish(V[1], weights(0), PROBE)
    assert await broadcaster.transport.publish(V[1], weights(0), PROBE) == first
    with pytest.raises(errors.VersionSealed):
        await broadcaster.transport.publish(V[1], weights(1), PROBE)
    with pytest.raises(errors.VersionNotNewer):
        await broadcaster.transport.publish(V[0], weights(1), PROBE)
    assert await broadcaster.transport.manifest(V[1]) == first


async def test_an_unsealed_version_is_invisible(broadcaster):
    transport = broadcaster.transport
    slices, buffers = describe_tensors(weights(0))
    with pytest.raises(errors.VersionNotOpen):
        await transport.publish_shard(V[1], slices, buffers)
    await transport.open_version(V[1], rank_count=2)
    await transport.publish_shard(V[1], slices[:1], buffers[:1], rank=0)
    with pytest.raises(errors.ShardsMissing) as missing:
        await transport.seal_version(V[1], PROBE)
    assert missing.value.metadata["missing_ranks"] == "1"
    with pytest.raises(errors.WeightVersionUnknown):
        await transport.manifest(V[1])
    with pytest.raises(errors.WeightVersionUnknown):
        await transport.manifest()
    await transport.publish_shard(V[1], slices[1:], buffers[1:], rank=1)
    await transport.seal_version(V[1], PROBE)
    assert len(await transport.fetch(await transport.manifest(V[1]))) == 2


async def test_bytes_that_do_not_match_their_header_are_not_taken(broadcaster):
    transport = broadcaster.transport
    slices, buffers = describe_tensors(weights(0))
    await transport.open_version(V[1])
    flipped = bytearray(buffers[1])
    flipped[-1] ^= 1
    for wrong in [buffers[0], flipped], [buffers[1], buffers[0]], [*buffers, b"x"], buffers[:1]:
        with pytest.raises(errors.WeightsCorrupt):
            await transport.publish_shard(V[1], slices, wrong)
    with pytest.raises(errors.ShardsMissing):
        await transport.seal_version(V[1], PROBE)


async def test_followers_hear_of_each_new_version(broadcaster):
    heard: asyncio.Queue[PolicyVersion] = asyncio.Queue()

    async def follow() -> None:
        async for version in broadcaster.transport.watch(None):
            heard.put_nowait(version)

    async with asyncio.TaskGroup() as group:
        follower = group.create_task(follow())
        for version in V[1:3]:
            await broadcaster.transport.publish(version, weights(version.step, 10), PROBE)
            assert await asyncio.wait_for(heard.get(), DEADLINE_S) == version
        follower.cancel()
    # A late one begins with the newest.
    late = broadcaster.transport.watch(V[0])
    assert await anext(late) == V[2]
    await late.aclose()


async def test_a_broken_stream_resumes_from_its_offset(broadcaster):
    tensors = weights(3)
    manifest = await broadcaster.transport.publish(V[1], tensors, PROBE)
    stub = broadcast_pb2_grpc.BroadcastServiceStub(broadcaster.channel)
    request = broadcast_pb2.FetchSlicesRequest(version=V[1].to_proto(), slice_indexes=[1, 0])
    whole = [message async for message in stub.FetchSlices(request)]
    assert whole[0].header.size_bytes == manifest.size_bytes
    data = b"".join(message.data for message in whole[1:])
    assert data == tensors["layer.1.weight"].tobytes() + tensors["layer.0.weight"].tobytes()
    for offset in (0, 1, 1_600_000, 2_000_001, len(data)):
        request.offset_bytes = offset
        rest = [message async for message in stub.FetchSlices(request)]
        assert b"".join(message.data for message in rest) == data[offset:]
    request.offset_bytes = len(data) + 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [message async for message in stub.FetchSlices(request)]
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE


class CuttingServicer(BroadcastServicer):
    """Ends each of the first streams after one frame of data."""

    cuts_left = 2
    offsets: list[int]

    async def FetchSlices(
        self, request: broadcast_pb2.FetchSlicesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.offsets.append(request.offset_bytes)
        sent = 0
        async for message in super().FetchSlices(request, context):
            yield message
            sent += 1
            if sent == 2 and self.cuts_left:
                self.cuts_left -= 1
                raise errors.Unreachable("cut")


async def test_a_fetch_survives_streams_that_break(broadcaster):
    tensors = weights(3)
    manifest = await broadcaster.transport.publish(V[1], tensors, PROBE)
    cutting = CuttingServicer(broadcaster.store, broadcaster.publications)
    cutting.offsets = []
    add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
    server, port = build_server(broadcaster.config, [(add, cutting, SERVICE)])
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", Access()) as channel:
        fetched = await GrpcWeightTransport(channel).fetch(manifest)
    await server.stop(None)
    assert cutting.offsets == [0, 1 << 20, 2 << 20]
    np.testing.assert_array_equal(fetched["layer.1.weight"], tensors["layer.1.weight"])


async def test_a_restarted_broadcaster_serves_what_was_sealed_and_nothing_else(broadcaster):
    tensors = weights(0)
    manifest = await broadcaster.transport.publish(V[1], tensors, PROBE)
    await broadcaster.transport.open_version(V[2])
    await broadcaster.restart()
    assert await broadcaster.transport.manifest() == manifest
    fetched = await broadcaster.transport.fetch(manifest)
    np.testing.assert_array_equal(fetched["layer.0.weight"], tensors["layer.0.weight"])
    with pytest.raises(errors.VersionNotOpen):
        await broadcaster.transport.seal_version(V[2], PROBE)
    await broadcaster.transport.publish(V[2], tensors, PROBE)


async def test_the_files_are_safetensors(broadcaster):
    from safetensors.numpy import load_file

    tensors = weights(0)
    await broadcaster.transport.publish(V[1], tensors, PROBE)
    loaded = load_file(broadcaster.config.run_dir / "versions" / "1.1" / "rank-00000.safetensors")
    np.testing.assert_array_equal(loaded["layer.1.weight"], tensors["layer.1.weight"])


async def test_pruning_keeps_the_newest_the_served_and_what_is_read(broadcaster):
    publications, store, state = broadcaster.publications, broadcaster.store, broadcaster.state
    for version in V[1:7]:
        await broadcaster.transport.publish(version, weights(version.step, 10), PROBE)
    state.away = True
    assert await publications.prune() == []  # what is served is not known
    state.away = False
    state.versions[SERVING] = V[2]
    with store.reading(V[1]):
        assert await publications.prune() == [V[3]]
        assert store.versions == [V[1], V[2], V[4], V[5], V[6]]
    assert await publications.prune() == [V[1]]
    state.versions[SERVING] = V[6]
    assert await publications.prune() == [V[2]]
    with pytest.raises(errors.WeightVersionUnknown):
        await broadcaster.transport.manifest(V[2])
    assert sorted(path.name for path in (broadcaster.config.run_dir / "versions").iterdir()) == ["1.4", "1.5", "1.6"]


async def test_an_adapter_needs_a_name_of_its_own_and_a_base_that_stays(broadcaster):
    publish, state = broadcaster.transport.publish, broadcaster.state

    def adapter(version: PolicyVersion, base: PolicyVersion) -> Adapter:
        return Adapter(adapter_name("run", version), base, 2, 4.0)

    with pytest.raises(errors.InvalidRequest) as refused:
        await publish(V[1], weights(1, 10), PROBE, adapter(V[2], V[1]))
    assert refused.value.metadata["field"] == "adapter.name"
    with pytest.raises(errors.WeightVersionUnknown):
        await publish(V[1], weights(1, 10), PROBE, adapter(V[1], V[0]))
    manifests = [await publish(v, weights(v.step, 10), PROBE, adapter(v, V[1])) for v in V[1:7]]
    assert [manifest.adapter for manifest in manifests] == [adapter(version, V[1]) for version in V[1:7]]
    state.versions[SERVING] = V[6]
    assert await broadcaster.publications.prune() == [V[2], V[3]]
    await broadcaster.restart()
    assert await broadcaster.transport.manifest(V[6]) == manifests[-1]
    assert broadcaster.store.versions == [V[1], V[4], V[5], V[6]]


async def test_a_full_store_refuses_until_it_is_pruned(broadcaster):
    for version in V[1:5]:
        await broadcaster.transport.publish(version, weights(version.step, 1200), PROBE)
    with pytest.raises(errors.BroadcastStoreFull):
        await broadcaster.transport.publish(V[5], weights(5, 1200), PROBE)
    await broadcaster.publications.prune()
    await broadcaster.transport.publish(V[5], weights(5, 1200), PROBE)


async def test_a_full_store_says_that_nothing_is_pruned_while_redis_is_away(broadcaster):
    for version in V[1:5]:
        await broadcaster.transport.publish(version, weights(version.step, 1200), PROBE)
    for away, waits_for in ((True, "redis"), (False, "")):
        broadcaster.state.away = away
        if away:
            assert await broadcaster.publications.prune() == []
            with pytest.raises(errors.BroadcastStoreFull) as refused:
                await broadcaster.transport.publish(V[5], weights(5, 1200), PROBE)
            assert refused.value.metadata["waits_for"] == waits_for
            assert refused.value.metadata["name"] == "broadcaster.max_store_bytes"
        else:
            assert await broadcaster.publications.prune()
            assert broadcaster.store.unpruned_for == waits_for
    await broadcaster.transport.publish(V[5], weights(5, 1200), PROBE)


async def test_shards_on_their_way_count_as_stored(broadcaster):
    store = broadcaster.store
    slices, _ = describe_tensors(weights(0, 2000))
    store.open(V[1], rank_count=3)
    first, second = (store.begin_shard(V[1], rank, slices) for rank in range(2))
    with pytest.raises(errors.BroadcastStoreFull):
        store.begin_shard(V[1], 2, slices)
    store.drop_shard(second)
    store.drop_shard(store.begin_shard(V[1], 2, slices))
    store.drop_shard(first)
    assert store.size_bytes == 0


async def test_ranks_are_bounded_and_few_missing_ones_are_named(broadcaster):
    with pytest.raises(errors.InvalidRequest):
        await broadcaster.transport.open_version(V[1], rank_count=2**31 - 1)
    await broadcaster.transport.open_version(V[1], rank_count=65_536)
    with pytest.raises(errors.ShardsMissing) as missing:
        await broadcaster.transport.seal_version(V[1], PROBE)
    assert missing.value.metadata["missing_ranks"].endswith(",14,15,...")


async def test_published_reaches_redis_also_when_redis_lost_it(broadcaster, valkey_url):
    state = State(valkey_url, broadcaster.config.run_id)
    publications = Publications(broadcaster.store, state, 3, 60.0)
    await broadcaster.transport.publish(V[1], weights(0, 10), PROBE)
    async with asyncio.TaskGroup() as group:
        mirror = group.create_task(publications.mirror())
        for _ in range(2):
            async with asyncio.timeout(DEADLINE_S):
                while await state.version(PUBLISHED) != V[1]:  # noqa: ASYNC110 another client writes it
                    await asyncio.sleep(0.02)
            await state.delete(PUBLISHED)
        mirror.cancel()
    await state.close()


async def test_a_version_that_finds_no_room_on_the_disk_is_refused_and_taken_when_there_is_some(
    make_config, small_disk
):
    disk = small_disk(8 << 20)
    running = Broadcaster(make_config(BroadcasterConfig, run_dir=disk.path), SharedState())
    await running.start()
    try:
        first = await running.transport.publish(V[1], weights(0), PROBE)
        disk.fill(left_bytes=1 << 20)
        for _ in range(3):
            with pytest.raises(errors.DiskFull) as refused:
                await running.transport.publish(V[2], weights(1), PROBE)
            assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert list((disk.path / "versions" / f".open-{V[2]}").iterdir()) == []
        disk.fill()
        with pytest.raises(errors.DiskFull):
            await running.transport.publish(V[2], weights(1), PROBE)
        assert await running.transport.manifest() == first
        disk.free()
        second = await running.transport.publish(V[2], weights(1), PROBE)
        fetched = await running.transport.fetch(second)
        np.testing.assert_array_equal(fetched["layer.0.weight"], weights(1)["layer.0.weight"])
    finally:
        await running.stop()


async def test_where_no_more_files_may_be_open_versions_are_refused_with_the_limit_and_taken_later(
    broadcaster, open_files
):
    transport, store = broadcaster.transport, broadcaster.store
    first = await transport.publish(V[1], weights(0), PROBE)
    await transport.publish(V[2], weights(1), PROBE)
    limit = open_files.exhaust()
    for call in (transport.publish(V[3], weights(1), PROBE), transport.fetch(first)):
        with pytest.raises(errors.TooManyFiles) as refused:
            await call
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.metadata["limit"] == str(limit)
    assert store.prune(1, set()) == []
    open_files.free()
    fetched = await transport.fetch(first)
    np.testing.assert_array_equal(fetched["layer.0.weight"], weights(0)["layer.0.weight"])
    assert (await transport.publish(V[3], weights(1), PROBE)).version == V[3]
    assert store.prune(1, set()) == [V[1], V[2]]
    assert [path.name for path in store._root.iterdir()] == [str(V[3])]


@dataclass(frozen=True)
class Rank:
    """What a publisher asks of the world of ranks, for several in one process."""

    rank: int
    board: Board
    layout: Layout

    def check(self) -> None:
        self.board.read("anything")


def ranks(directory: Path, count: int) -> Iterator[Rank]:
    store = FileStore(str(directory / "store"), count)
    for rank in range(count):
        roll = Roll(PrefixStore("roll", store), rank, count)
        yield Rank(rank, Board(PrefixStore("board", store), roll), Layout(data=count))
        roll.close()


def halves(tensors: dict[str, np.ndarray], rank: int) -> list[Box]:
    cut = {0: slice(0, 150), 1: slice(150, 400)}[rank]
    return [Box(name, values.shape, (cut.start, 0), values[cut]) for name, values in tensors.items()]


def published(store: VersionStore, version: PolicyVersion) -> bool:
    """Whether a rank's part of it is there."""
    return version in store._open and bool(store._open[version].shards)


async def test_ranks_publish_a_version_together_also_where_the_broadcaster_starts_again(broadcaster, tmp_path):
    first, second = (RankedPublisher(broadcaster.transport, rank) for rank in ranks(tmp_path, 2))
    tensors = weights(0)

    async def publish(publisher: RankedPublisher, rank: int) -> None:
        while True:
            try:
                return await publisher.publish(V[1], halves(tensors, rank), PROBE)
            except errors.Unreachable:  # as the trainer does
                publisher.transport = broadcaster.transport
                await asyncio.sleep(0.05)

    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(publish(first, 0))
        while not published(broadcaster.store, V[1]):  # noqa: ASYNC110 rank 0's part is there, and it waits
            await asyncio.sleep(0.01)
        await broadcaster.restart()
        first.transport = second.transport = broadcaster.transport
        group.create_task(publish(second, 1))
    manifest = await broadcaster.transport.manifest(V[1])
    fetched = await broadcaster.transport.fetch(manifest)
    assert all(np.array_equal(fetched[name], values) for name, values in tensors.items())
    assert len(manifest.slices) == 4
    await asyncio.gather(publish(first, 0), publish(second, 1))  # a repeat finds it sealed
