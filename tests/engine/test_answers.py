"""How long a decode engine waits for a prefill engine that pushes KV, and may be gone: sockets alone, no engine."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from slipstream.engine.vllm.installed import find_vllm

find_vllm()  # which brings zmq, or the command that installs it

import zmq  # noqa: E402
import zmq.asyncio  # noqa: E402

from slipstream.engine.vllm.answers import Answers, waiting  # noqa: E402

TIMEOUT_S = 1.0
"""What a transfer may take."""
LEASE_S = 100.0
"""Until when it may be written, where that is not what a body is about."""
BUSY_S = 30.0
"""What a busy machine may add: far from what a wait that is not given up would take."""


class Pull:
    """Asks for KV as vLLM does, in a task of its own."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context

    async def ask(self, address: str, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> bytes:
        waiting.set((time.monotonic() + lease_s, timeout_s))
        with Answers(self._context, address, zmq.DEALER, bind=False, linger=0) as socket:
            await socket.send(b"pull")
            while (answer := await socket.recv()) == b"to be continued":
                continue
            return answer

    async def lost(self, address: str, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> float:
        """Seconds until it was given up."""
        started_s = time.monotonic()
        with pytest.raises(ConnectionError):
            await self.ask(address, lease_s, timeout_s)
        return time.monotonic() - started_s


@pytest_asyncio.fixture
async def pull() -> AsyncIterator[Pull]:
    context = zmq.asyncio.Context()
    yield Pull(context)
    context.term()  # returns when all sockets are closed, those that watch included


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind_to_random_port("tcp://127.0.0.1")
        yield router


def address_of(socket: zmq.asyncio.Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


async def test_an_answer_in_several_parts_comes(pull, peer):
    asked = asyncio.create_task(pull.ask(address_of(peer)))
    identity, message = await peer.recv_multipart()
    assert message == b"pull"
    await asyncio.sleep(2 * TIMEOUT_S)  # slow, and within the lease
    await peer.send_multipart((identity, b"to be continued"))
    await peer.send_multipart((identity, b"done"))
    assert await asked == b"done"


async def test_nobody_at_the_address_is_noticed_at_once(pull, peer):
    address = address_of(peer)
    peer.unbind(address)
    assert await pull.lost(address, timeout_s=LEASE_S) < BUSY_S


async def test_a_peer_that_stands_still_before_it_heard_of_the_pull_never_does(pull):
    heard = bytearray()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):  # the kernel accepts, the process says nothing
            heard.extend(data)
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert TIMEOUT_S - 0.1 < await pull.lost(f"tcp://{host}:{port}") < BUSY_S
    assert heard
    assert b"pull" not in heard


async def test_what_a_peer_had_begun_to_write_has_its_time_after_its_death(pull, peer):
    asked = asyncio.create_task(pull.lost(address_of(peer)))
    await peer.recv_multipart()
    died_s = time.monotonic()
    peer.close()
    await asked
    assert TIMEOUT_S - 0.1 < time.monotonic() - died_s < BUSY_S


async def test_a_peer_that_says_nothing_is_waited_for_as_long_as_it_may_write(pull, peer):
    asked = asyncio.create_task(pull.lost(address_of(peer), lease_s=2.0))
    await peer.recv_multipart()
    assert 1.9 < await asked < BUSY_S


@pytest.mark.timeout(180)  # it imports much of vLLM
async def test_a_prefill_engine_begins_no_write_for_what_it_holds_no_longer():
    """It stood still, and its peer may have given the blocks to others since; right before the write, too."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

    from slipstream.engine.vllm.mooncake import HostWorker, TimedPointers

    worker = HostWorker.__new__(HostWorker)  # one that runs takes Mooncake's engine, which needs the system's libraries
    worker.async_zmq_ctx, worker.is_kv_consumer, worker.is_kv_producer = zmq.asyncio.Context(), True, True
    pull = upstream.MooncakeXferMetadata("127.0.0.1", 1, 1, 0, {"pull": ("prompt", [])}, [], [], [])
    now_s = time.perf_counter()
    for expire_s, late in ((now_s - 1, ["pull"]), (now_s + 60, [])):
        held = upstream.SendBlockMeta("prefill", "prompt", [], asyncio.Event(), expire_s)
        sources, _, _, failed, why = await worker._build_transfer_params([("pull", held)], pull, [], [])
        assert (failed, why) == (late, "asked too late" if late else None)
        assert isinstance(sources, TimedPointers)
        assert (sources.until_s < time.perf_counter()) == bool(late)
    assert worker._send_blocks("127.0.0.1:1", sources_of(0.0), [], []) == -1


def sources_of(until_s: float) -> list[int]:
    from slipstream.engine.vllm.mooncake import TimedPointers

    sources = TimedPointers([1])
    sources.until_s = until_s
    return sources
