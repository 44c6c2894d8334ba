"""Clients that send what nobody should, or take their time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import ValidationError

from slipstream.api.rollout.v1 import session_pb2
from slipstream.gateway.requests import ChatRequest

from .conftest import says

Make = Callable[..., Any]
ASK = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
GIVE_UP_S = 60.0


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


WRONG = {
    b"": ("invalid_json", "the body is empty"),
    b"{": ("invalid_json", "line 1 column 2"),
    b"[]": ("invalid_json", "no JSON object"),
    b"null": ("invalid_json", "no JSON object"),
    b"\xff\xfe": ("invalid_utf8", "byte 0 begins no character"),
    b'{"a": "\xc3"}': ("invalid_utf8", "byte 7 begins no character"),
    '{"a": 1}'.encode("utf-16"): ("invalid_utf8", "byte 0 begins no character"),
    rb'{"a": "\ud800"}': ("invalid_utf8", "half of a character"),
    b"[" * 100_000: ("nested_too_deep", "more than 64"),
    b'{"a":' * 65 + b"{}" + b"}" * 65: ("nested_too_deep", "more than 64"),
    b'{"model": NaN}': ("number_out_of_range", "'NaN'"),
    b'{"model": 1e999}': ("number_out_of_range", "'1e999'"),
    b'{"seed": ' + b"9" * 5000 + b"}": ("number_out_of_range", "an integer of 5000 digits: at most 400"),
    b'{"model": "m", "model": "n"}': ("duplicate_key", "the key 'model'"),
    b'{"a": {"b": 1, "c": 2, "b": 3}}': ("duplicate_key", "the key 'b'"),
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: f"{body[:16]!r}")
async def test_a_body_that_is_no_request_is_refused_for_what_is_wrong_with_it(make_world: Make, body: bytes) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(body))
        status, answer = await _answer(reader)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        code, said = WRONG[body]
        assert answer["error"]["code"] == code
        assert said in answer["error"]["message"]
        writer.close()


async def test_a_mark_of_byte_order_is_no_part_of_a_body(make_world: Make) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(b"\xef\xbb\xbf" + ASK))
        assert (await _answer(reader))[0] == 200
        writer.close()


async def test_a_body_too_large_is_refused_without_reading_it_all(make_world: Make) -> None:
    async with make_world(max_body_bytes=1024) as world:
        reader, writer = await _send(world.http.port, _post(b"x" * 2048))
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        writer.close()


async def test_headers_have_a_bound(make_world: Make) -> None:
    async with make_world() as world:
        for header, path, limit in (
            (["x: " + "y" * 20_000], "/v1/completions", "8192 bytes"),
            (["y" * 20_000 + ": x"], "/v1/completions", "8192 bytes"),
            ([f"x{number}: y" for number in range(100)], "/v1/completions", "more than 64 headers"),
            ([], "/v1/" + "y" * 20_000, "8192 bytes"),
        ):
            reader, writer = await _send(world.http.port, _post(b"", *header, path=path))
            status, answer = await _answer(reader)
            assert (status, answer["error"]["code"]) == (431, "headers_too_large")
            assert limit in answer["error"]["message"]
            writer.close()


async def test_unknown_paths_and_methods_are_refused_in_openais_shape(make_world: Make) -> None:
    async with make_world() as world:
        for data, wanted in (
            (_post(ASK, path="/v1/files"), (404, "not_found")),
            (b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", (405, "method_not_allowed")),
        ):
            reader, writer = await _send(world.http.port, data)
            status, answer = await _answer(reader)
            assert (status, answer["error"]["code"]) == wanted
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


@pytest.mark.parametrize("head", ["content-length: 9000", "transfer-encoding: chunked"])
async def test_bodies_beyond_the_room_for_all_are_refused_unread_and_taken_later(make_world: Make, head: str) -> None:
    """Nothing comes of the body that is told of, and yet its bytes are not promised twice."""
    async with make_world(max_body_bytes=10_000, max_all_bodies_bytes=10_000 + len(ASK)) as world:
        begun = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer mine\r\n{head}\r\n\r\n".encode()
        )
        _, first = await _send(world.http.port, begun)
        async with asyncio.timeout(GIVE_UP_S):
            while not REGISTRY.get_sample_value("slipstream_gateway_body_bytes"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reader, second = await _send(world.http.port, begun)
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (429, "bodies_full")
        assert "gateway.max_all_bodies_bytes" in answer["error"]["message"]
        reader, small = await _send(world.http.port, _post(ASK))
        assert (await _answer(reader))[0] == 200
        first.close()
        async with asyncio.timeout(GIVE_UP_S):
            while REGISTRY.get_sample_value("slipstream_gateway_body_bytes"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for writer in (second, small):
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
        assert "2 connections are open, as many as may be (gateway.max_connections)" in answer["error"]["message"]
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


async def _until_nobody_is_connected(world: Any) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while world.http.connection_count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_asks_on_and_on_and_reads_no_answer_loses_the_connection(make_world: Make) -> None:
    async with make_world(write_timeout_s=0.5) as world:
        world.runner.script = says("x" * 200_000)
        _, writer = await asyncio.open_connection("127.0.0.1", world.http.port, limit=1024)

        async def ask() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(_post(ASK) * 16)
                    await writer.drain()

        asking = asyncio.ensure_future(ask())
        async with asyncio.timeout(GIVE_UP_S):
            while not world.http.connection_count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await _until_nobody_is_connected(world)
        async with asyncio.timeout(GIVE_UP_S):
            await asking
        writer.close()


BROKEN = {
    "a chunk's size that is none": (b"zz\r\nhello\r\n", "transfer-encoding: chunked"),
    "a chunk that is longer than it says": (b"2\r\nhello\r\n0\r\n\r\n", "transfer-encoding: chunked"),
    "no gzip": (b"no gzip at all", "content-encoding: gzip"),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_body_that_cannot_be_decoded_is_the_clients_fault(
    make_world: Make, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, header = BROKEN[kind]
    async with make_world() as world:
        data = _post(body, header)
        if "chunked" in header:
            data = data.replace(f"content-length: {len(body)}\r\n".encode(), b"")
        reader, writer = await _send(world.http.port, data)
        status, answer = await _answer(reader)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert not world.runner.turns
        writer.close()
        await _until_nobody_is_connected(world)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s3cret\x01\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization : Bearer s3cret\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 9000 + b"\r\nauthorization: Bearer s3cret\r\n\r\n", 431),
        (b"GET /v1/models?key=s3cret HTTP/9.9\r\nhost: x\r\n\r\n", 400),
        (b"authorization: Bearer s3cret\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer s3cret\r\ncontent-length: -1\r\n\r\n", 400),
    ],
)
async def test_what_is_no_http_is_refused_in_openais_shape_and_no_key_is_logged(
    make_world: Make, head: bytes, wanted: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, head)
        status, answer = await _answer(reader)
        assert status == wanted
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        writer.close()
        await _until_nobody_is_connected(world)
    written = capfd.readouterr()
    assert "s3cret" not in caplog.text + written.out + written.err


async def test_a_key_of_any_bytes_is_a_wrong_key(make_world: Make) -> None:
    async with make_world() as world:
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\xfe\xc3\xa9\r\n\r\n"
        reader, writer = await _send(world.http.port, head)
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        writer.close()


async def test_a_body_is_read_for_those_with_a_key_alone(make_world: Make) -> None:
    async with make_world() as world:
        data = _post(b"", length=10_000_000).replace(b"Bearer mine", b"Bearer nobody")
        reader, writer = await _send(world.http.port, data)
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        writer.close()


async def test_an_expectation_that_is_none_is_refused_in_openais_shape(make_world: Make) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(ASK, "expect: miracles"))
        status, answer = await _answer(reader)
        assert status == 417
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        writer.close()


def _nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


TOOLS = '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":%s}]}'
CALLS = '{"model":"m","messages":[{"role":"assistant","tool_calls":[%s]}]}'
STRANGE = {
    "no text in a message": r'{"model":"m","messages":[{"role":"user","content":"\ud800"}]}',
    "no text in a part": r'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\udfff"}]}]}',
    "no text in a stop": r'{"model":"m","messages":[{"role":"user","content":"x"}],"stop":["\ud800"]}',
    "no text as the model": r'{"model":"\ud800","messages":[{"role":"user","content":"x"}]}',
    "no text as a field": r'{"\ud800":1,"model":"m","messages":[{"role":"user","content":"x"}]}',
    "no text in a tool": TOOLS % r'{"name":"f","parameters":{"a":"\ud800"}}',
    "no text as a tool's key": TOOLS % r'{"name":"f","parameters":{"\ud800":1}}',
    "no text in its description": TOOLS % r'{"name":"f","description":"\ud800"}',
    "no text in a call": CALLS % r'{"id":"\ud800","function":{"name":"f","arguments":"{}"}}',
    "no number in a tool": TOOLS % r'{"name":"f","parameters":{"a":NaN}}',
    "a number beyond all": TOOLS % r'{"name":"f","parameters":{"a":1e999}}',
    "a tool that is nested deeply": TOOLS % f'{{"name":"f","parameters":{_nested(300)}}}',
    "a tool that is nested more deeply": TOOLS % f'{{"name":"f","parameters":{_nested(900)}}}',
    "no temperature": r'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "a temperature beyond all": r'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    "an integer of many digits": '{"model":"m","messages":[{"role":"user","content":"x"}],"seed":' + "9" * 5000 + "}",
}


def _asked(**fields: Any) -> bytes:
    return json.dumps({**json.loads(ASK), **fields}).encode()


SAID = {"role": "user", "content": "x"}
PART = {"type": "text", "text": ""}
MANY = {
    "fields": (json.dumps({f"k{n}": 1 for n in range(40_000)}).encode(), "too_many_elements", None),
    "fields of a message": (_asked(messages=[{f"k{n}": 1 for n in range(40_000)}]), "too_many_elements", None),
    "parts of a message": (_asked(messages=[{"role": "user", "content": [PART] * 40_000}]), "too_many_elements", None),
    "tools that are none": (_asked(tools=[1] * 40_000), "too_many_elements", None),
    "messages that are none": (_asked(messages=[1] * 40_000), "too_many_elements", None),
    "strings without end": (b"[" + b'"",' * 40_000, "too_many_elements", None),
    "some fields": (_asked(**{f"k{n}": 1 for n in range(9000)}), "unknown_parameter", "k0"),
    "some fields of a message": (
        _asked(messages=[{**SAID, **{f"k{n}": 1 for n in range(9000)}}]), "unknown_parameter", "messages.0.k0"
    ),
    "some parts": (_asked(messages=[{**SAID, "content": [PART] * 5000}]), "invalid_value", "messages.0.content"),
    "some tools": (_asked(tools=[1] * 9000), "invalid_value", "tools.0"),
    "some messages": (_asked(messages=[1] * 9000), "invalid_value", "messages.0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANY)
async def test_what_one_body_may_hold_is_bounded_before_it_is_looked_at(make_world: Make, kind: str) -> None:
    body, code, param = MANY[kind]
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(body))
        status, answer = await _answer(reader)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)
        assert not world.runner.turns
        writer.close()


@pytest.mark.parametrize(
    "text", ["1," * 300_000, '"\\,[{' * 40_000, "\\" * 40_001 + ',"' * 40_000], ids=["table", "code", "backslashes"]
)
async def test_marks_within_a_text_are_no_values(make_world: Make, text: str) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(_asked(messages=[{"role": "user", "content": text}])))
        assert (await _answer(reader))[0] == 200
        assert world.runner.turns[0].messages[0].content == text
        writer.close()


def test_the_errors_of_one_body_are_few() -> None:
    wrong = {f"k{n}": 1 for n in range(1000)}
    fields = {"messages": [wrong, *[1] * 1000], "tools": [wrong, *[1] * 1000], "stop": [1] * 1000, **wrong}
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(fields)
    assert refused.value.error_count() < 16


@pytest.mark.parametrize("kind", STRANGE)
async def test_what_is_json_and_yet_no_request_is_refused_before_the_runner(make_world: Make, kind: str) -> None:
    async with make_world() as world:
        reader, writer = await _send(world.http.port, _post(STRANGE[kind].encode()))
        status, answer = await _answer(reader)
        assert status == 400, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert not world.runner.turns
        writer.close()
