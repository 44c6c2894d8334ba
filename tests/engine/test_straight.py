"""Weights that the engine reads from the trainer's memory by itself: the same model, the same roll-back."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.errors import DeadlineExceeded, ProbeFailed, WeightsCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import ReceivingEngine
from slipstream.engine.worker.verification import Verification
from slipstream.trainer.kept import in_engine_order, whole_boxes
from slipstream.weights.config import WeightsConfig
from slipstream.weights.manifest import Manifest, Probe, Source
from slipstream.weights.straight.host import HostReceiver
from slipstream.weights.straight.lender import Lender
from slipstream.weights.straight.received import Received
from tests.engine.bench import DEADLINE_S, Bench, prompt_of, until
from tests.engine.oracle import tensors

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Rank:
    """A trainer's rank, in this process."""

    def __init__(self, transport: str, dtype: str, device: torch.device) -> None:
        config = WeightsConfig.model_validate({"transport": transport, "dtype": dtype})
        self.lender = Lender(config, device, "127.0.0.1:1")
        self._device = device
        self._host = HostReceiver()

    def keep(self, version: PolicyVersion, seed: int, probe: Probe | None = None) -> Manifest:
        weights = {name: tensor.to(self._device) for name, tensor in tensors(seed).items()}
        kept = self.lender.keep(version, in_engine_order(whole_boxes(weights)))
        return Manifest(version, kept.slices, probe, sources=(Source(len(kept.slices), kept.source),))

    async def read(
        self, bench: Bench, manifest: Manifest, reader: str = "reader", timeout_s: float = DEADLINE_S
    ) -> Any:
        receive = bench.engine.receive if isinstance(bench.engine, ReceivingEngine) else self._host
        copy = self.lender.copies.lend(manifest.version, reader)
        offer = await asyncio.to_thread(self.lender.link.offer, copy.memory, copy.size_bytes, reader)
        try:
            return await receive(manifest, [offer], reader, time.monotonic() + timeout_s)
        finally:
            self.lender.copies.give_back(reader)


@contextmanager
def source(bench: Bench, transport: str) -> Iterator[Rank]:
    on_card = getattr(bench.kind, "device", "cpu") == "cuda" and transport != "shm"
    made = Rank(transport, getattr(bench.kind, "dtype", "float32"), torch.device("cuda:0" if on_card else "cpu"))
    try:
        yield made
    finally:
        made.lender.close()


def transports(bench: Bench) -> tuple[str, ...]:
    """On a CPU engines are forked from this process, in which NIXL's threads must not have begun: `test_nixl.py`.

    On a card the trainer is on the engine's, with which NCCL does not connect it.
    """
    on_card = isinstance(bench.engine, ReceivingEngine) and getattr(bench.kind, "device", "") == "cuda"
    return ("shm", "nixl", "cuda_ipc") if on_card else ("shm", "nccl")


def after(bench: Bench) -> PolicyVersion:
    return PolicyVersion(bench.version.incarnation, bench.version.step + 1)


def release(received: Any) -> None:
    if isinstance(received, Received):
        received.release()


async def apply(bench: Bench, manifest: Manifest, received: Any, seed: int) -> None:
    await bench.engine.update(manifest.version, received, Verification(manifest, None, received))
    bench.version, bench.seed = manifest.version, seed
    release(received)


def checksum(name: str, array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


async def test_what_is_read_straight_is_what_an_update_brings(bench: Bench):
    await bench.serve(2)
    expected, prompt = await bench.engine.checksums(checksum), prompt_of(40)
    answer = await bench.greedy(prompt)
    if isinstance(bench.engine, ReceivingEngine):
        await bench.engine.check_room("shm")
    for transport in transports(bench):
        with source(bench, transport) as rank:
            for seed in (1, 2):
                manifest = rank.keep(after(bench), seed)
                await apply(bench, manifest, await rank.read(bench, manifest), seed)
                assert (await bench.engine.checksums(checksum) == expected) == (seed == 2), transport
        assert await bench.greedy(prompt) == answer, transport


async def test_running_requests_cross_it(bench: Bench):
    before = bench.version
    request = bench.request(prompt_of(20), samples=4, max_new_tokens=100)
    running = asyncio.create_task(bench.run(request, flush_s=0.0))
    await until(lambda: bench.engine.load().running_samples == 4, "running samples")
    with source(bench, "shm") as rank:
        manifest = rank.keep(after(bench), 2)
        await apply(bench, manifest, await rank.read(bench, manifest), 2)
    for sample in await running:
        assert len(sample.token_ids) == 100
        assert set(sample.versions) <= {before, manifest.version}
        assert sample.versions == sorted(sample.versions)


async def test_wrong_bytes_never_reach_the_engine(bench: Bench):
    expected = await bench.engine.checksums(checksum)
    with source(bench, "shm") as rank:
        manifest = rank.keep(after(bench), 2)
        copy = rank.lender.copies.lend(manifest.version, "test")
        copy.memory.data[1001] ^= 4
        with pytest.raises(WeightsCorrupt):
            await rank.read(bench, manifest)
        assert await bench.engine.checksums(checksum) == expected
        copy.memory.data[1001] ^= 4
        await apply(bench, manifest, await rank.read(bench, manifest), 2)
    assert await bench.engine.checksums(checksum) != expected


async def test_a_version_that_fails_its_probe_gives_way_to_the_one_before(bench: Bench):
    with source(bench, "shm") as rank:
        good = rank.keep(after(bench), 2)
        await apply(bench, good, await rank.read(bench, good), 2)
        expected = await bench.engine.checksums(checksum)
        bad = rank.keep(after(bench), 1, Probe((1, 2, 3), (5.0, 5.0), 0.1))
        received = await rank.read(bench, bad)
        with pytest.raises(ProbeFailed):
            await bench.engine.update(bad.version, received, Verification(bad, None, received))
        release(received)
        assert bench.engine.version == good.version
        assert await bench.engine.checksums(checksum) == expected
        await bench.serve(1)  # through the host, after one that was not
        third = rank.keep(after(bench), 2)
        await apply(bench, third, await rank.read(bench, third), 2)
        assert await bench.engine.checksums(checksum) == expected


async def test_no_more_versions_lie_beside_the_weights_than_there_are_places(bench: Bench):
    with source(bench, "shm") as rank:
        first = rank.keep(after(bench), 2)
        await apply(bench, first, await rank.read(bench, first), 2)
        manifest = rank.keep(after(bench), 1)
        held = await rank.read(bench, manifest)
        if isinstance(held, Received):  # other engines have them in the worker's own memory
            with pytest.raises(DeadlineExceeded):
                await rank.read(bench, manifest, timeout_s=0.1)
        release(held)
        await apply(bench, manifest, await rank.read(bench, manifest), 1)
