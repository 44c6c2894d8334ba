"""Waiting for a Mooncake prefill worker that may be gone.

It writes KV into the memory of the decode worker and then says so. The blocks there may be given to others only when it
cannot write any more: when it never heard of them, when its connection ended, or after a time beyond which it begins no
write. vLLM's socket tells of none of these, and waits for three minutes and more.
"""

# vLLM, which brings zmq, is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

waiting: ContextVar[tuple[float, float]] = ContextVar("waiting")
"""Of the pull that this task makes: until when its blocks may be written to, on the monotonic clock, and the seconds
that a transfer may take."""


class Answers:
    """The socket of one pull. Waiting for an answer on it ends when none can come, and nothing can be written."""

    def __init__(self, context: zmq.asyncio.Context, address: str, *_: Any, **__: Any) -> None:
        self._until_s, self._timeout_s = waiting.get()
        self._socket: Any = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(self._timeout_s * 1000))
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._events: Any = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | ends)
        self._socket.connect(address)
        self._lost: asyncio.Task[None] | None = None
        self._reached = False

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lost is not None:
            self._lost.cancel()
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close()

    def setsockopt(self, option: int, value: int) -> None:
        """vLLM sets a timeout here, of three minutes and more; ours goes by the lease."""

    async def send(self, message: bytes) -> None:
        await self._socket.send(message)

    async def recv(self) -> bytes:
        if self._lost is None:
            self._lost = asyncio.create_task(self._loss())
        answer = asyncio.ensure_future(self._socket.recv())
        try:
            left_s = max(self._until_s - time.monotonic(), 0.0)
            await asyncio.wait((answer, self._lost), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and self._lost.done():
                self._lost.result()
                if self._reached:  # what it had begun to write may still be on its way
                    await asyncio.wait((answer,), timeout=self._timeout_s)
            if answer.done():
                return answer.result()
            raise ConnectionError("the prefill worker is gone" if self._lost.done() else "the lease has ended")
        finally:
            answer.cancel()

    async def _loss(self) -> None:
        """Return when the other side is not there, or not any more. It hears of the pull after the handshake only."""
        while (await recv_monitor_message(self._events))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._reached = True
