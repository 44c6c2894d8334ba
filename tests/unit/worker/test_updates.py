"""The update of a worker's weights, on an engine and a transport of plain arrays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.common import errors
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import PausedEngine, UpdateReport
from slipstream.engine.worker.updates import WorkerState, WorkerUpdates
from slipstream.weights.adapter import Adapter, adapter_name
from slipstream.weights.manifest import Manifest, Probe, WeightSlice, describe_tensors

V = [PolicyVersion(1, step) for step in range(6)]
KEEPER = "orchestrator"


class ArrayEngine:
    """The part of an engine that updates touch: parameters are arrays, the probe is their sum."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.shapes = {"w": (4, 4)}
        self.held: dict[str, np.ndarray] = {}
        self.damage: Callable[[dict[str, np.ndarray]], None] = lambda held: None
        self.probe_error = 0.0
        self.gate = asyncio.Event()
        self.gate.set()

    def parameters(self, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        return self.held

    def unchanged(self, names: Collection[str]) -> Collection[str]:
        return ()

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0 + self.probe_error for _ in token_ids[1:]]

    async def update(
        self, version: PolicyVersion, tensors: Mapping[str, Any], verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        await self.gate.wait()
        old, self.held = self.held, {name: values.copy() for name, values in tensors.items()}
        try:
            self.damage(self.held)
            verify(self)
        except Exception:
            self.held = old
            raise
        previous, self.version = self.version, version
        return UpdateReport(version, previous, 0.01, 0.001, 3)


class ArrayTransport:
    """Versions in memory; `corrupt` ones fail their CRC as real ones do."""

    def __init__(self) -> None:
        self.published: dict[PolicyVersion, tuple[Manifest, dict[str, np.ndarray]]] = {}
        self.corrupt: set[PolicyVersion] = set()
        self.fetches: list[PolicyVersion] = []
        self.sealed = asyncio.Condition()

    async def put(self, version: PolicyVersion) -> None:
        tensors = {"w": np.full((4, 4), version.step, np.float32)}
        slices, _ = describe_tensors(tensors)
        self.published[version] = Manifest(version, slices, Probe((1, 2), (-1.0,), 0.01)), tensors
        async with self.sealed:
            self.sealed.notify_all()

    async def put_adapter(self, version: PolicyVersion, base: PolicyVersion, value: float) -> None:
        """What adds `value` to each weight; with the weights, if it is its own base."""
        halves = {"A": np.ones((1, 4), np.float32), "B": np.full((4, 1), value, np.float32)}
        tensors = {f"base_model.model.w.lora_{half}.weight": tensor for half, tensor in halves.items()}
        if base == version:
            tensors["w.weight"] = np.full((4, 4), 100.0, np.float32)
        slices, _ = describe_tensors(tensors)
        adapter = Adapter(adapter_name("run", version), base, 1, 1.0)
        self.published[version] = Manifest(version, slices, Probe((1, 2), (-1.0,), 0.01), adapter=adapter), tensors

    async def publish(
        self, version: PolicyVersion, tensors: Mapping[str, np.ndarray], probe: Probe, adapter: Adapter | None = None
    ) -> Manifest:
        raise AssertionError("workers do not publish")

    async def open_version(self, version: PolicyVersion, rank_count: int = 1) -> None:
        raise AssertionError("workers do not publish")

    async def publish_shard(
        self,
        version: PolicyVersion,
        slices: tuple[WeightSlice, ...],
        buffers: list[memoryview],
        rank: int = 0,
        source: str = "",
    ) -> int:
        raise AssertionError("workers do not publish")

    async def publish_slices(
        self,
        version: PolicyVersion,
        slices: tuple[WeightSlice, ...],
        buffers: list[memoryview],
        probe: Probe,
        adapter: Adapter | None = None,
        source: str = "",
    ) -> Manifest:
        raise AssertionError("workers do not publish")

    async def seal_version(self, version: PolicyVersion, probe: Probe, adapter: Adapter | None = None) -> Manifest:
        raise AssertionError("workers do not publish")

    async def manifest(self, version: PolicyVersion | None = None) -> Manifest:
        version = version or max(self.published)
        if version not in self.published:
            raise errors.WeightVersionUnknown("never sealed")
        return self.published[version][0]

    async def watch(self, after: PolicyVersion | None = None) -> AsyncIterator[PolicyVersion]:
        while True:
            async with self.sealed:
                while max(self.published, default=UNSET) <= (after or UNSET):
                    await self.sealed.wait()
            after = max(self.published)
            yield after

    async def fetch(self, manifest: Manifest) -> dict[str, np.ndarray]:
        self.fetches.append(manifest.version)
        await asyncio.sleep(0)
        if manifest.version in self.corrupt:
            raise errors.WeightsCorrupt("CRC differs")
        return self.published[manifest.version][1]


class Bench:
    def __init__(self) -> None:
        self.engine, self.transport = ArrayEngine(), ArrayTransport()
        self.now_s = 0.0
        self.serving = UNSET
        engine: Any = self.engine

        async def serving() -> PolicyVersion:
            return self.serving

        self.updates = WorkerUpdates(engine, self.transport, "decode-1", serving, lambda: self.now_s)

    async def bring_to(self, version: PolicyVersion, update_id: str = "", holder: str = KEEPER) -> None:
        update_id = update_id or f"to {version}"
        await self.updates.begin(update_id, holder, version, 10)
        await self.updates.apply(update_id)
        self.updates.finish(update_id)

    def weight(self) -> float:
        return float(self.engine.held["w"][0, 0])


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    for version in V[1:4]:
        await bench.transport.put(version)
    await bench.bring_to(V[1])
    return bench


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 plain state, no event
            await asyncio.sleep(0.001)


async def refused(call: Awaitable[Any], error: type[errors.SlipstreamError]) -> dict[str, str]:
    with pytest.raises(error) as caught:
        await call
    return caught.value.metadata


async def test_an_update_moves_the_worker_and_repeats_answer_the_same(bench):
    updates = bench.updates
    assert await updates.begin("u", KEEPER, V[2], 10) == 64
    assert await updates.begin("u", KEEPER, V[2], 10) == 64
    applied = await updates.apply("u")
    assert await updates.apply("u") is applied
    assert (applied.verified_slice_count, applied.probe_max_abs_error) == (1, 0.0)
    updates.finish("u")
    updates.finish("u")
    assert await updates.apply("u") is applied
    updates.abort("u")
    assert (updates.version, updates.state, bench.weight()) == (V[2], WorkerState.SERVING, 2.0)


async def test_a_second_holder_is_told_who_holds_the_update(bench):
    await bench.updates.begin("u", KEEPER, V[2], 10)
    metadata = await refused(bench.updates.begin("other", "operator", V[3], 10), errors.UpdateInProgress)
    assert metadata["holder"] == KEEPER
    await refused(bench.updates.apply("other"), errors.UpdateNotOpen)
    bench.updates.abort("u")
    await bench.bring_to(V[3], "other", "operator")


async def test_a_holder_that_lost_track_may_begin_again(bench):
    await bench.updates.begin("lost", KEEPER, V[2], 10)
    await bench.bring_to(V[3], "again")
    await refused(bench.updates.apply("lost"), errors.UpdateNotOpen)


async def test_versions_only_move_forward(bench):
    await bench.bring_to(V[2])
    for version in (V[1], V[2]):
        await refused(bench.updates.begin("back", KEEPER, version, 10), errors.VersionNotNewer)


async def test_a_lease_that_ends_before_the_swap_leaves_the_old_version(bench):
    await bench.updates.begin("u", KEEPER, V[2], 10)
    bench.now_s = 10
    await refused(bench.updates.apply("u"), errors.UpdateNotOpen)
    assert (bench.updates.version, bench.updates.state) == (V[1], WorkerState.SERVING)
    await bench.bring_to(V[2], "other", "operator")


async def test_a_lease_that_ends_after_the_swap_finishes_it(bench):
    await bench.updates.begin("u", KEEPER, V[2], 10)
    await bench.updates.apply("u")
    await refused(bench.updates.begin("other", "operator", V[3], 10), errors.UpdateInProgress)
    bench.now_s = 10
    await bench.bring_to(V[3], "other", "operator")
    assert bench.updates.version == V[3]


async def test_a_swap_goes_on_when_its_caller_leaves(bench):
    await bench.updates.begin("u", KEEPER, V[2], 10)
    bench.engine.gate.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.updates.apply("u"), 0.01)
    await refused(bench.updates.begin("v", KEEPER, V[3], 10), errors.UpdateInProgress)
    bench.engine.gate.set()
    await bench.updates.apply("u")
    assert bench.updates.version == V[2]


async def test_corrupt_bytes_keep_the_old_version_until_a_good_fetch_heals(bench):
    bench.transport.corrupt.add(V[2])
    await refused(bench.updates.begin("u", KEEPER, V[2], 10), errors.WeightsCorrupt)
    assert (bench.updates.version, bench.updates.state, bench.weight()) == (V[1], WorkerState.STALE, 1.0)
    assert bench.updates.stale_reason
    bench.transport.corrupt.clear()
    await bench.bring_to(V[2], "again")
    assert (bench.updates.state, bench.updates.stale_reason) == (WorkerState.SERVING, "")


@pytest.mark.parametrize("fault", ["checksum", "probe", "not finite", "engine"])
async def test_a_failed_check_puts_the_old_weights_back(bench, fault):
    def damage(held: dict[str, np.ndarray]) -> None:
        if fault == "engine":
            raise ValueError("shape")
        held["w"][3, 3] += 1e-6

    if fault in ("checksum", "engine"):
        bench.engine.damage = damage
    else:
        bench.engine.probe_error = 0.02 if fault == "probe" else float("nan")
    error = errors.WeightsCorrupt if fault in ("checksum", "engine") else errors.ProbeFailed
    await bench.updates.begin("u", KEEPER, V[2], 10)
    with pytest.raises(error):
        await bench.updates.apply("u")
    assert (bench.updates.version, bench.updates.state, bench.weight()) == (V[1], WorkerState.STALE, 1.0)
    bench.engine.damage, bench.engine.probe_error = lambda held: None, 0.0
    await bench.bring_to(V[2], "again")
    assert bench.updates.state is WorkerState.SERVING


def adapting_bench() -> Bench:
    bench = Bench()
    bench.engine.shapes = {"w.weight": (4, 4)}
    return bench


async def test_an_adapter_is_added_to_its_base_which_is_fetched_once():
    bench = adapting_bench()
    await bench.transport.put_adapter(V[0], V[0], 0.0)
    await bench.transport.put_adapter(V[1], V[0], 1.0)
    await bench.transport.put_adapter(V[2], V[0], 5.0)
    for version, expected in ((V[0], 100.0), (V[1], 101.0), (V[2], 105.0)):
        await bench.bring_to(version)
        assert (bench.engine.held["w.weight"] == expected).all()
    assert bench.transport.fetches == V[:3]

    late = adapting_bench()
    late.transport = late.updates._transport = bench.transport
    fetched = await late.updates.begin("late", KEEPER, V[2], 10)
    manifests = [bench.transport.published[version][0] for version in (V[0], V[2])]
    assert fetched == sum(manifest.size_bytes for manifest in manifests)
    await late.updates.apply("late")
    assert (late.engine.held["w.weight"] == 105.0).all()


async def test_an_adapter_that_fits_no_weight_leaves_the_worker_stale_on_its_old_ones():
    bench = adapting_bench()
    await bench.transport.put_adapter(V[0], V[0], 0.0)
    await bench.bring_to(V[0])
    await bench.transport.put_adapter(V[1], V[0], 1.0)
    del bench.transport.published[V[1]][1]["base_model.model.w.lora_A.weight"]
    await refused(bench.updates.begin("broken", KEEPER, V[1], 10), errors.WeightsCorrupt)
    assert bench.updates.state is WorkerState.STALE
    assert (bench.engine.held["w.weight"] == 100.0).all()


async def test_an_unknown_version_changes_nothing(bench):
    await refused(bench.updates.begin("u", KEEPER, V[5], 10), errors.WeightVersionUnknown)
    await bench.bring_to(V[2])


async def test_published_versions_are_prefetched(bench):
    async with asyncio.TaskGroup() as group:
        follow = group.create_task(bench.updates.follow())
        await until(lambda: V[3] in bench.transport.fetches)
        await bench.transport.put(V[4])
        await until(lambda: V[4] in bench.transport.fetches)
        assert await bench.updates.begin("u", KEEPER, V[4], 10) == 0
        await bench.updates.apply("u")
        follow.cancel()
    assert bench.transport.fetches.count(V[4]) == 1


async def test_a_newer_version_that_came_during_an_update_is_kept(bench):
    await bench.updates.begin("u", KEEPER, V[2], 10)
    async with asyncio.TaskGroup() as group:
        follow = group.create_task(bench.updates.follow())
        await until(lambda: V[3] in bench.transport.fetches)
        await bench.updates.apply("u")
        bench.updates.finish("u")
        assert await bench.updates.begin("v", KEEPER, V[3], 10) == 0
        follow.cancel()


@pytest.mark.parametrize(("serving", "expected"), [(UNSET, V[3]), (V[2], V[2]), (V[5], V[3])])
async def test_a_started_worker_refits_itself_to_what_is_served(serving, expected):
    bench = Bench()
    bench.serving = serving
    async with asyncio.TaskGroup() as group:
        follow = group.create_task(bench.updates.follow())
        await asyncio.sleep(0.01)
        assert bench.updates.state is WorkerState.STARTING
        for version in (V[2], V[3]):
            await bench.transport.put(version)
        await until(lambda: bench.updates.state is WorkerState.SERVING)
        follow.cancel()
    assert bench.updates.version == expected


async def test_a_change_of_state_is_announced(bench):
    changed = bench.updates.changed
    await bench.bring_to(V[2])
    assert changed.is_set()
    assert not bench.updates.changed.is_set()
