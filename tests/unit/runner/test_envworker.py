"""The connection between a runner and its environment worker."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, cast

from slipstream.runner.envclient import MAX_LINE_BYTES
from slipstream.runner.envworker import serve_socket


class Host:
    """Answers with as many letters as it is asked for."""

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"id": request["id"], "letters": "x" * request["count"]}

    async def take_back(self, reply: dict[str, Any]) -> None:
        assert len(reply["letters"]) == MAX_LINE_BYTES

    async def close(self) -> None:
        """Nothing is open."""

    def ends_with(self, end: Callable[[], None]) -> None:
        """It ends with its connection."""


async def test_an_answer_too_large_is_an_error_and_the_next_one_comes() -> None:
    ours, theirs = socket.socketpair()
    serving = asyncio.ensure_future(serve_socket(cast(Any, Host()), theirs))
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        assert json.loads(await reader.readline()) == {"ready": True}
        for number, count in ((1, MAX_LINE_BYTES), (0, 3), (2, 3)):
            writer.write(json.dumps({"id": number, "count": count}).encode() + b"\n")
            if number:
                reply = json.loads(await reader.readline())
                assert reply["id"] == number
                assert ("error" in reply) == (count == MAX_LINE_BYTES)
        writer.close()
        await serving
