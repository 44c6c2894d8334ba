"""Weights straight from a trainer's memory: over real gRPC, shared memory, and process groups."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from straight_trainer import PROBE, tensors

from slipstream.common import errors
from slipstream.common.version import PolicyVersion
from slipstream.weights.straight.packing import TensorBox
from tests import standstill
from tests.integration.weights.conftest import READ_S

V = [PolicyVersion(1, step) for step in range(8)]
TRANSPORTS = ("shm", "nccl")


def check(fetched: dict[str, np.ndarray], step: int) -> None:
    expected = tensors(step)
    assert fetched.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(fetched[name], values)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_versions_come_whole_and_the_broadcaster_has_no_byte_of_them(world, transport):
    trainer, reader = await world.trainer(transport), world.reader(transport)
    for step in (1, 2, 3):
        manifest = await trainer.publish(V[step])
        assert manifest == await reader.manifest()
        check(await reader.fetch(manifest), step)
    assert world.store.size_bytes == 0
    assert world.fetched == [(transport, manifest.size_bytes)] * 3
    with pytest.raises(errors.Unsupported):
        await trainer.publisher.fetch(manifest)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_parts_of_several_ranks_become_whole_tensors(world, transport):
    ranks = [await world.trainer(transport), await world.trainer(transport)]
    whole = {name: torch.from_numpy(values) for name, values in tensors(1).items()}
    await ranks[0].publisher.open_version(V[1], 2)
    for rank, (trainer, first, last) in enumerate(zip(ranks, (0, 1234), (1234, 3000), strict=True)):
        boxes = [TensorBox(name, (3000, 100), (first, 0), t[first:last]) for name, t in whole.items()]
        kept = trainer.lender.keep(V[1], boxes)
        await trainer.publisher.publish_shard(V[1], kept.slices, [], rank, kept.source)
    manifest = await ranks[0].publisher.seal_version(V[1], PROBE)
    assert len(manifest.sources) == 2
    check(await world.reader(transport).fetch(manifest), 1)


async def test_a_restarted_broadcaster_still_knows_where_the_bytes_are(world):
    trainer = await world.trainer("shm")
    manifest = await trainer.publish(V[1])
    await world.server.stop(None)
    await world.start()
    assert await world.reader("shm").manifest() == manifest
    check(await world.reader("shm").fetch(manifest), 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_wrong_bytes_are_found_by_their_sum(world, transport):
    trainer, reader = await world.trainer(transport), world.reader(transport)
    manifest = await trainer.publish(V[1])
    copy = trainer.lender.copies.lend(V[1], "test")
    copy.memory.data[12345] ^= 1
    with pytest.raises(errors.WeightsCorrupt, match="checksum of"):
        await reader.fetch(manifest)
    copy.memory.data[12345] ^= 1
    check(await reader.fetch(manifest), 1)


async def test_values_that_are_no_numbers_are_refused(world):
    trainer = await world.trainer("shm")
    box = TensorBox("model.norm.weight", (3,), (0,), torch.tensor([1.0, torch.nan, 1.0]))
    manifest = await trainer.publish(V[1], [box])
    with pytest.raises(errors.WeightsCorrupt, match="not finite"):
        await world.reader("shm").fetch(manifest)


async def test_what_is_read_from_an_overwritten_copy_does_not_count(world):
    trainer, reader = await world.trainer("shm", lease_s=0.05), world.reader("shm")
    manifest = await trainer.publish(V[1])
    read = reader._read

    async def slow(*arguments):
        result = await read(*arguments)
        for step in (2, 3):
            await trainer.publish(V[step])
        return result

    reader._read = slow
    with pytest.raises(errors.WeightVersionUnknown):
        await reader.fetch(manifest)
    with pytest.raises(errors.WeightVersionUnknown):  # and is not there any more
        await world.reader("shm").fetch(manifest)
    check(await world.reader("shm").fetch(await trainer.publish(V[4])), 4)


async def test_another_transport_than_the_trainers_is_refused(world):
    trainer = await world.trainer("shm")
    manifest = await trainer.publish(V[1])
    with pytest.raises(errors.Unsupported, match=r"weights\.transport is 'nccl'"):
        await world.reader("nccl").fetch(manifest)


async def test_what_is_published_with_its_bytes_comes_by_grpc(world):
    reader = world.reader("shm")
    values = {"w": np.ones((4, 4), np.float32)}
    manifest = await reader.publish(V[1], values, PROBE)
    np.testing.assert_array_equal((await reader.fetch(manifest))["w"], values["w"])
    assert world.fetched == [("grpc", 64)]


async def test_copies_of_a_closed_trainer_are_gone(world):
    before = published_files()
    trainer, reader = await world.trainer("shm"), world.reader("shm")
    for step in (1, 2, 3, 4):
        check(await reader.fetch(await trainer.publish(V[step])), step)
    assert len(trainer.lender.copies.versions) == 2
    assert trainer.lender.copies.size_bytes == 2 * sum(values.nbytes for values in tensors(1).values())
    trainer.lending.close()
    gc.collect()
    assert published_files() <= before


def published_files() -> int:
    """How many of this process's open files are copies that a trainer keeps."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "slipstream-published" in os.readlink(f"/proc/self/fd/{fd}")
    return count


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_trainer_hangs_nobody_and_the_next_one_is_read(world, transport):
    process, reader = await world.process(transport), world.reader(transport)
    await world.keep(process, 1)
    check(await reader.fetch(await reader.manifest()), 1)
    await world.keep(process, 2)
    manifest = await reader.manifest()
    read = reader._read

    async def cut_off(*arguments):
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        return await read(*arguments)

    reader._read, reader._timeout_s = cut_off, 10.0
    with pytest.raises((errors.Unreachable, errors.DeadlineExceeded)):
        await reader.fetch(manifest)
    reader._read, reader._timeout_s = read, READ_S
    trainer = await world.trainer(transport)
    check(await reader.fetch(await trainer.publish(PolicyVersion(2, 3))), 3)


async def test_a_transfer_that_stands_still_ends_at_its_deadline(world):
    process, reader = await world.process("nccl"), world.reader("nccl")
    await world.keep(process, 1)
    check(await reader.fetch(await reader.manifest()), 1)
    await world.keep(process, 2)
    manifest = await reader.manifest()
    reader._timeout_s = 1.0
    read = reader._read

    async def stopped(*arguments):
        standstill.stop(process.pid)
        return await read(*arguments)

    reader._read = stopped
    with pytest.raises((errors.DeadlineExceeded, errors.Unreachable)):
        async with asyncio.timeout(READ_S):
            await reader.fetch(manifest)
    os.kill(process.pid, signal.SIGCONT)
    reader._read, reader._timeout_s = read, READ_S
    check(await reader.fetch(manifest), 2)  # on another link
