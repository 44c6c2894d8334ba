"""Clients that send what nobody should, or take their time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from slipstream.api.rollout.v1 import session_pb2

Make = Callable[..., Any]
ASK = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
GIVE_UP_S = 20.0


async def _send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


def _post(body: bytes, *headers: str, path: str = "/v1/chat/completions", length: int | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "authorization: Bearer mine",
        f"content-length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and body of the next answer."""
    async with asyncio.timeout(GIVE_UP_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        body = await reader.readexactly(length)
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}'])
async def test_a_body_that_is_no_request_is_refused_in_openais_shape(make_world: Make, body: bytes) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(body))
        status, answer = await _answer(reader)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        writer.close()


async def test_a_body_too_large_is_refused_without_reading_it_all(make_world: Make) -> None:
    async with make_world(max_body_bytes=1024) as world:
        reader, writer = await _send(world.http.port, _post(b"x" * 2048))
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        writer.close()


async def test_headers_have_a_bound(make_world: Make) -> None:
    async with make_world() as world:
        for header in (["x: " + "y" * 20_000], [f"x{number}: y" for number in range(500)]):
            reader, writer = await _send(world.http.port, _post(ASK, *header))
            async with asyncio.timeout(GIVE_UP_S):
                head = await reader.readline()
            assert head.split()[1:2] == [b"400"]
            writer.close()


async def test_unknown_paths_and_methods_are_refused_in_openais_shape(make_world: Make) -> None:
    async with make_world() as world:
        for data, wanted in (
            (_post(ASK, path="/v1/files"), 404),
            (b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        ):
            reader, writer = await _send(world.http.port, data)
            status, answer = await _answer(reader)
            assert status == wanted
            assert answer["error"]["message"]
            writer.close()


async def test_without_a_key_nothing_is_told(make_world: Make) -> None:
    async with make_world() as world:
        for given in (
            "",
            "authorization: Basic bWluZQ==\r\n",
            "authorization: Bearer \r\n",
            f"authorization: Bearer {'x' * 600}\r\n",
        ):
            reader, writer = await _send(world.http.port, f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{given}\r\n".encode())
            status, answer = await _answer(reader)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            writer.close()


async def test_a_connection_that_says_nothing_is_closed(make_world: Make) -> None:
    async with make_world(header_timeout_s=0.2) as world:
        for data in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost:"):
            reader, writer = await _send(world.http.port, data)
            async with asyncio.timeout(GIVE_UP_S):
                assert await reader.read() == b""
            writer.close()


async def test_a_body_that_does_not_come_ends_the_request(make_world: Make) -> None:
    async with make_world(body_timeout_s=0.2) as world:
        reader, writer = await _send(world.http.port, _post(ASK[:10], length=len(ASK)))
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        writer.close()


async def test_one_connection_too_many_is_told_so_and_room_comes_back(make_world: Make) -> None:
    async with make_world(max_connections=2) as world:
        held = [await _send(world.http.port, b"") for _ in range(2)]
        async with asyncio.timeout(GIVE_UP_S):
            while world.http.connection_count < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reader, writer = await _send(world.http.port, b"")
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (503, "connections_full")
        writer.close()
        for _, other in held:
            other.close()
        async with asyncio.timeout(GIVE_UP_S):
            while world.http.connection_count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reader, writer = await _send(world.http.port, _post(ASK))
        assert (await _answer(reader))[0] == 200
        writer.close()


async def test_a_reader_that_takes_nothing_is_let_go_and_holds_up_nobody(make_world: Make) -> None:
    async def endless(request: session_pb2.RunTurnRequest) -> AsyncIterator[session_pb2.RunTurnResponse]:
        while True:
            yield session_pb2.RunTurnResponse(text="x" * 65536)

    async with make_world(write_timeout_s=0.5) as world:
        world.runner.script = endless
        body = json.dumps({**json.loads(ASK), "stream": True}).encode()
        _, writer = await _send(world.http.port, _post(body))
        async with asyncio.timeout(GIVE_UP_S):
            while not world.runner.turns:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with world.client("yours") as client:
            assert [model.id async for model in client.models.list()] == ["my-run"]
        await world.until_aborted(1)
        writer.close()
