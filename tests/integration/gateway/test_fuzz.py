"""The gateway before 216 connections that hypothesis makes up: each answer is OpenAI's, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .hostile_requests import Hostile, hostile

TOGETHER, BATCHES = 12, 18
GIVE_UP_S = 60.0
PAUSE_S = 0.01
TIMEOUT_S = 1.0
"""Of the gateway, for what does not come."""
STATUSES = {400, 401, 404, 405, 408, 413, 417, 431}
MAX_BODY_BYTES = 64 << 10
REPEATS = 5
AS_MADE = (Phase.generate,)
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def answers(data: bytes, *, head_only: bool) -> tuple[list[tuple[int, bytes, bytes]], bytes]:
    """Status, head and body of each whole answer, and what is left. Those to HEAD say how long their body would be."""
    found: list[tuple[int, bytes, bytes]] = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        lengths = [
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        if b"transfer-encoding: chunked" in head.lower():  # a stream
            if not rest.endswith(b"0\r\n\r\n"):
                break
            lengths = [len(rest)]
        length = lengths[0] if lengths and not (head_only and not rest.startswith(b"{")) else 0
        if len(rest) < length:
            break
        found.append((status, head, rest[:length]))
        data = rest[length:]
    return found, data


async def talk(port: int, each: Hostile) -> tuple[bytes, bool]:
    """All that is answered to it, and whether it was cut off: a server that closes before it was sent everything has
    the system throw away what is on its way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = bytearray()
    cut_off = False

    async def hear() -> None:
        nonlocal cut_off
        try:
            while data := await reader.read(1 << 16):
                heard.extend(data)
                if any(status >= 200 for status, *_ in answers(bytes(heard), head_only=each.head_only)[0]):
                    return
        except ConnectionError:
            cut_off = True

    hearing = asyncio.ensure_future(hear())
    try:
        with contextlib.suppress(OSError):  # the gateway may have hung up: ENOTCONN is no ConnectionError
            for part in each.parts:
                writer.write(part)
                await writer.drain()
                if each.pauses:
                    await asyncio.sleep(PAUSE_S)
            if each.ending == "half-close":
                writer.write_eof()
        if each.ending == "vanish":
            hearing.cancel()
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.wait([hearing])
        return bytes(heard), cut_off
    finally:
        hearing.cancel()
        writer.close()


def check(each: Hostile, heard: bytes, *, cut_off: bool) -> None:
    """What came is HTTP, and a refusal is one of OpenAI's."""
    found, left = answers(heard, head_only=each.head_only)
    if each.ending != "vanish" and not cut_off:
        assert heard == b"" or found, "half an answer"
        assert not left or left.startswith(b"HTTP/1."), left
    for status, head, body in found:
        if status in (100, 200) or (each.head_only and not body):
            continue
        assert status in STATUSES, (status, body)
        assert b"application/json" in head.lower()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


async def send(world: Any, batch: list[Hostile]) -> None:
    heard = await asyncio.gather(*(talk(world.http.port, each) for each in batch))
    for each, (data, cut_off) in zip(batch, heard, strict=True):
        check(each, data, cut_off=cut_off)
    async with asyncio.timeout(GIVE_UP_S):
        while world.http.connection_count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def works(world: Any) -> None:
    async with world.client().with_options(max_retries=8) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "hello"


async def until_no_more_tasks_than(count: int) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while len(asyncio.all_tasks()) > count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of what failed, which is to be seen
def test_whatever_comes_is_answered_in_openais_shape_and_leaves_nothing(make_world: Callable[..., Any]) -> None:
    limits = dict.fromkeys(("header_timeout_s", "body_timeout_s", "keepalive_timeout_s"), TIMEOUT_S)
    with asyncio.Runner() as loop:
        stack = AsyncExitStack()
        world = loop.run(stack.enter_async_context(make_world(max_body_bytes=MAX_BODY_BYTES, **limits)))
        sent: list[Hostile] = []
        try:
            loop.run(works(world))
            task_count = len(asyncio.all_tasks(loop.get_loop())) + 1

            @seed(11)
            @settings(max_examples=BATCHES, deadline=None, database=None, suppress_health_check=SLOW, phases=AS_MADE)
            @given(st.lists(hostile(), min_size=TOGETHER, max_size=TOGETHER))
            def batch(hostiles: list[Hostile]) -> None:
                sent.extend(hostiles)
                loop.run(send(world, hostiles))

            batch()
            assert len(sent) >= TOGETHER * BATCHES
            loop.run(works(world))
            loop.run(until_no_more_tasks_than(task_count))
            # What was made up stays in this process, too: the large ones once more, now that all of them are there.
            large = [each for each in sent if sum(map(len, each.parts)) > MAX_BODY_BYTES]
            gc.collect()
            before_bytes = psutil.Process().memory_info().rss
            for _ in range(REPEATS):
                loop.run(send(world, large))
            gc.collect()

            sent_bytes = REPEATS * sum(len(part) for each in large for part in each.parts)
            assert psutil.Process().memory_info().rss - before_bytes < sent_bytes / 4
        finally:
            loop.run(stack.aclose())
