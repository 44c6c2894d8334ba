"""Streams that break off, come in pieces, or are never read."""

from __future__ import annotations

import asyncio
import random
import zlib
from typing import Any

import grpc
import pytest
from callers import DEADLINE_S, Answer, Caller, fault
from run_process import living_paths
from stack import REPLICAS, REST_S, rpc, until
from tame import FAR
from test_generated import LEAST
from wire import flipped, length_delimited

pytestmark = pytest.mark.timeout(590, func_only=False)

PUBLISH = rpc("BroadcastService.PublishShard")
VERSION = {"incarnation": 1, "step": FAR + 100}


def header(size: int = 16, rank: int = 0, **fields: Any) -> bytes:
    count = size // 4
    part = {
        "name": "edges",
        "global_shape": [2 * count],
        "offsets": [0],
        "shape": [count],
        "dtype": "float32",
        "size_bytes": size,
        "crc32": zlib.crc32(bytes(size)),
    }
    message = {"version": VERSION, "rank": rank, "slices": [{**part, **fields}]}
    return PUBLISH.request(header=message).SerializeToString()


def data(size: int = 16) -> bytes:
    return PUBLISH.request(data=bytes(size)).SerializeToString()


async def opened(broadcaster: Caller, ranks: int = 2) -> None:
    await broadcaster.ask(rpc("BroadcastService.OpenVersion"), request_id="edges", version=VERSION, rank_count=ranks)


BROKEN = {
    "nothing": ([], "FRAME_INVALID"),
    "an empty message": ([b""], "FRAME_INVALID"),
    "data without a header": ([data()], "FRAME_INVALID"),
    "a header after data": ([data(), header()], "FRAME_INVALID"),
    "two headers": ([header(), header()], "FRAME_INVALID"),
    "a header alone": ([header()], "WEIGHTS_CORRUPT"),
    "too little": ([header(), data(8)], "WEIGHTS_CORRUPT"),
    "too much": ([header(), data(), data()], "WEIGHTS_CORRUPT"),
    "other bytes": ([header(crc32=1), data()], "WEIGHTS_CORRUPT"),
    "a frame cut short": ([header(), data()[:-3]], "FRAME_INVALID"),
    "no frame at all": ([b"\xff" * 40], "FRAME_INVALID"),
    "a header that is none": ([length_delimited(2, b"\xff\xff\xff")], "FRAME_INVALID"),
    "a header of nothing": ([length_delimited(2, b"")], "INVALID_REQUEST"),
    "a rank too many": ([header(rank=2), data()], "INVALID_REQUEST"),
    "a slice beyond its tensor": ([header(offsets=[5]), data()], "INVALID_REQUEST"),
    "negative offsets": ([header(offsets=[-1]), data()], "INVALID_REQUEST"),
    "another size": ([header(size_bytes=12), data(12)], "INVALID_REQUEST"),
    "more than the store holds": (
        [header(shape=[2**40], global_shape=[2**40], size_bytes=2**42)],
        "BROADCAST_STORE_FULL",
    ),
    "an unknown type": ([header(dtype="int4"), data()], "INVALID_REQUEST"),
    "a quantization": ([header(quantization="fp8"), data()], "UNSUPPORTED"),
}


async def test_a_broken_shard_is_refused_with_its_reason_and_leaves_nothing(stack):
    async with stack.caller("broadcaster") as broadcaster:
        await opened(broadcaster)
        for kind, (messages, reason) in BROKEN.items():
            answer = await broadcaster.call(PUBLISH, *messages)
            assert answer.status[1] == reason, f"{kind}: {answer}"
            assert not fault(PUBLISH, answer), f"{kind}: {fault(PUBLISH, answer)}"
        good = await broadcaster.call(PUBLISH, header(), data())
        assert good.code == "OK"
        assert uploads(stack) == []


def random_shard(rng: random.Random) -> list[bytes]:
    """Some messages of a shard in any order and number, whole, cut off, with bits turned over, or none at all."""
    messages: list[bytes] = []
    for _ in range(rng.randint(1, 4)):
        message = rng.choice((header(), data(), data(rng.randrange(64))))
        match rng.randrange(4):
            case 0:
                message = flipped(message, rng)[1]
            case 1:
                message = message[: rng.randrange(len(message) + 1)]
            case 2:
                message = rng.randbytes(rng.randrange(64))
            case _:
                pass
        messages.append(message)
    return messages


async def test_random_shards_get_a_documented_status_and_leave_nothing(stack):
    rng = stack.rng("shards")
    todo = iter([random_shard(rng) for _ in range(LEAST)])
    async with stack.caller("broadcaster") as broadcaster:
        await opened(broadcaster)

        async def work() -> None:
            for messages in todo:
                answer = await broadcaster.call(PUBLISH, *messages)
                assert not fault(PUBLISH, answer), f"{messages}: {fault(PUBLISH, answer)}"

        await asyncio.gather(*(work() for _ in range(16)))

    async def clean() -> bool:
        return uploads(stack) == []

    assert await until(clean, REST_S), uploads(stack)


async def test_overlapping_slices_do_not_become_a_version(stack):
    async with stack.caller("broadcaster") as broadcaster:
        await opened(broadcaster, ranks=1)
        part = {
            "name": "edges",
            "global_shape": [2048],
            "dtype": "float32",
            "size_bytes": 16,
            "shape": [4],
            "crc32": zlib.crc32(bytes(16)),
        }
        slices = [{**part, "offsets": [min(4 * i, 4 * 510)]} for i in range(512)]
        message = PUBLISH.request(header={"version": VERSION, "slices": slices})
        shard = await broadcaster.call(PUBLISH, message.SerializeToString(), data(16 * 512))
        assert shard.code == "OK", str(shard)
        seal = rpc("BroadcastService.SealVersion")
        answer = await broadcaster.ask(seal, request_id="edges", version=VERSION)
        assert answer.status == ("DATA_LOSS", "WEIGHTS_CORRUPT"), str(answer)
        assert not fault(seal, answer)


async def test_shards_that_are_abandoned_or_cancelled_leave_nothing(stack):
    async with stack.caller("broadcaster") as broadcaster:
        await opened(broadcaster)
        invoke = broadcaster.channel.stream_unary(PUBLISH.path, request_serializer=None, response_deserializer=None)

        async def abandon(number: int) -> None:
            call = invoke(timeout=DEADLINE_S, metadata=broadcaster.metadata)
            if number % 3:
                await call.write(header(1 << 20))
                if number % 3 > 1:
                    await call.write(data(1 << 19))
                    await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await call

        for start in range(0, 60, 10):
            await asyncio.gather(*(abandon(start + number) for number in range(10)))

        async def clean() -> bool:
            return uploads(stack) == []

        assert await until(clean, REST_S), uploads(stack)


def uploads(stack) -> list[str]:
    return [path.name for path in living_paths(stack.run.path / "versions", ".open-*/upload-*")]


@pytest.mark.parametrize("replica", REPLICAS)
async def test_whoever_never_reads_holds_up_nobody(replica, stack):
    """The silent clients of the `stack` fixture are there all the time; more come here, and leave in the middle."""
    with stack.silent(replica):
        await ask_often(replica, stack)


async def ask_often(replica, stack) -> None:
    async with stack.caller(replica) as caller:
        cheap = {
            "orchestrator": "RunService.GetRun",
            "broadcaster": "BroadcastService.GetManifest",
            "router": "RouterService.ListWorkers",
            "sandbox": "SandboxService.GetCapacity",
            "runner-1": "RowsService.ReleaseRows",
            "trainer": "TrainerService.GetStatus",
        }.get(replica, "WorkerService.GetWorker")
        fields = {"request_id": "edges"} if cheap.endswith("ReleaseRows") else {}
        for _ in range(40):  # whoever waits for the silent ones waits beyond each call's deadline
            answer = await caller.ask(rpc(cheap), **fields)
            assert not isinstance(answer, Answer) or not fault(rpc(cheap), answer), str(answer)
            await asyncio.sleep(0.01)
