"""Remembers answers by `request_id`: a repeat gets the first answer and starts nothing."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from slipstream.common.errors import RequestIdReused

ResponseT = TypeVar("ResponseT")


@dataclass
class _Entry:
    digest: bytes
    expires_s: float
    answer: asyncio.Future[Any]
    size_bytes: int = 0


class RequestMemory:
    """Answers of one servicer, bounded in number, bytes and age.

    An answer is remembered once it exists; a call that failed or was cancelled is forgotten, so that its
    retry runs. A repeat that arrives while the first call runs waits for it.
    """

    def __init__(self, capacity: int = 4096, ttl_s: float = 600.0, limit_bytes: int = 16 << 20) -> None:
        self._capacity = capacity
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._ttl_s = ttl_s
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def once(self, request: Any, run: Callable[[], Awaitable[ResponseT]]) -> ResponseT:
        """Run the call, or answer as it was answered. Raises `RequestIdReused` on the same id with another body."""
        request_id: str = request.request_id
        if not request_id:
            return await run()
        key: tuple[str, str] = (request.DESCRIPTOR.full_name, request_id)
        digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
        while True:
            self._expire()
            entry = self._entries.get(key)
            if entry is None:
                return await self._first(key, digest, run)
            if entry.digest != digest:
                raise RequestIdReused("this request_id came with another body before", request_id=request_id)
            answer = await asyncio.shield(entry.answer)
            if answer is not None:
                return answer

    async def _first(self, key: tuple[str, str], digest: bytes, run: Callable[[], Awaitable[ResponseT]]) -> ResponseT:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = self._entries[key] = _Entry(digest, time.monotonic() + self._ttl_s, answer)
        try:
            response = await run()
        except BaseException:
            if self._entries.get(key) is entry:
                del self._entries[key]
            answer.set_result(None)  # whoever waits tries by itself
            raise
        answer.set_result(response)
        if self._entries.get(key) is entry:
            entry.size_bytes = response.ByteSize() if isinstance(response, Message) else 0
            self._size_bytes += entry.size_bytes
        return response

    def _expire(self) -> None:
        """Drop what is too old, and the oldest beyond the bound; calls still running stay."""
        now = time.monotonic()
        for _ in range(len(self._entries)):
            key, entry = next(iter(self._entries.items()))
            if not entry.answer.done():  # a long poll must not keep all that came after it
                self._entries.move_to_end(key)
                continue
            full = len(self._entries) >= self._capacity or self._size_bytes > self._limit_bytes
            if entry.expires_s > now and not full:
                return
            del self._entries[key]
            self._size_bytes -= entry.size_bytes
