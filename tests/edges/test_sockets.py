"""Clients that speak another language, say nothing, or come without the token."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from callers import DEADLINE_S, Caller
from contract import Rpc, common_statuses, rpcs
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2 import DATA, HEADERS, PREFACE, SETTINGS, frame
from stack import REPLICAS

pytestmark = pytest.mark.timeout(590, func_only=False)

IDLE = 100
QUICK = 1000

LANGUAGES = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes": random.Random(1).randbytes(4096),
    "half a preface": PREFACE[:10],
    "a preface alone": PREFACE,
    "a frame larger than allowed": PREFACE + frame(SETTINGS, 0, 0, b"") + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "data before headers": PREFACE + frame(SETTINGS, 0, 0, b"") + frame(DATA, 0, 1, b"x" * 100),
    "headers that are none": PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 4, 1, b"\xff" * 64),
    "settings of a wrong size": PREFACE + frame(SETTINGS, 0, 0, b"abc"),
}


async def serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        return answer.status == health_pb2.HealthCheckResponse.SERVING


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize("replica", REPLICAS)
async def test_other_languages_and_idle_connections_harm_nobody(replica, stack):
    address = stack.endpoints[replica]
    with ExitStack() as idle:
        for _ in range(IDLE):
            idle.enter_context(connected(address))
        for said in LANGUAGES.values():
            with connected(address) as client, suppress(OSError):
                client.sendall(said)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(0.2)
                client.recv(4096)
        with connected(address) as client:
            client.settimeout(0.5)
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with pytest.raises((ssl.SSLError, ConnectionError, TimeoutError)):
                context.wrap_socket(client)
        assert await serving(address)
    for _ in range(QUICK // len(REPLICAS)):
        connected(address).close()
    assert await serving(address)


def first(stack, replica: str) -> Rpc:
    """A unary method that this process serves."""
    return next(
        rpc for rpc in rpcs()[stack.served[replica][0]] if not rpc.client_streaming and not rpc.server_streaming
    )


@pytest.mark.parametrize("replica", REPLICAS)
async def test_nothing_is_done_without_the_token(replica, stack):
    async with stack.caller(replica, token=None) as stranger:
        for service in stack.served[replica]:
            for rpc in rpcs()[service]:
                for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", ""),)):
                    answer = await stranger.call(rpc, rpc.request().SerializeToString(), metadata=metadata)
                    assert answer.status == ("UNAUTHENTICATED", "TOKEN_INVALID"), f"{rpc.short}: {answer}"
        garbage = await stranger.call(first(stack, replica), b"\xff" * 20)
        assert garbage.status == ("UNAUTHENTICATED", "TOKEN_INVALID")


@pytest.mark.parametrize("replica", REPLICAS)
async def test_what_grpc_answers_itself_is_in_the_documents(replica, stack):
    rpc = first(stack, replica)
    async with stack.caller(replica) as caller:
        body = rpc.request().SerializeToString()
        huge = await caller.call(rpc, body, metadata=(*caller.metadata, ("x-huge", "x" * 200_000)))
        late = await caller.call(rpc, body, timeout_s=-1.0)
        packed = await caller.call(rpc, bytes(100_000), compression=grpc.Compression.Gzip)
        unserved = await caller.call(Rpc("edges.Unknown", "Call", Empty, Empty, False, False, frozenset()), b"")
        unknown = await caller.call(Rpc(rpc.service, "Unknown", Empty, Empty, False, False, frozenset()), b"")
        assert (huge.code, late.code) == ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
        assert (packed.code, unserved.code, unknown.code) == ("UNIMPLEMENTED",) * 3, str(packed)
        for answer in (huge, late, packed, unserved, unknown):
            assert (answer.code, "") in common_statuses(), str(answer)


@pytest.mark.parametrize("replica", REPLICAS)
async def test_calls_given_up_at_once_end_as_cancelled(replica, stack):
    rpc = first(stack, replica)
    async with stack.caller(replica) as caller:

        async def give_up(number: int) -> None:
            invoke = caller.channel.unary_unary(rpc.path, request_serializer=None, response_deserializer=None)
            call = invoke(b"", timeout=DEADLINE_S, metadata=caller.metadata)
            await asyncio.sleep(0.001 * (number % 3))
            call.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await call
            assert await call.code() in (
                grpc.StatusCode.CANCELLED,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.OK,
            )

        await asyncio.gather(*(give_up(number) for number in range(60)))
        assert isinstance(caller, Caller)
