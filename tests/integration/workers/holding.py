"""Points at which a test can hold an engine or a connection, to break something at that very moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from typing import Any

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import (
    DecodeRequest,
    Engine,
    PausedEngine,
    PrefillRequest,
    PrefillResult,
    SampleChunk,
    UpdateReport,
)
from tests import standstill

DEADLINE_S = 60.0


class Point:
    """Something that is let through, unless a test closes it; then `reached` says that somebody waits there."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._reached = asyncio.Event()

    def close(self) -> None:
        self._open.clear()
        self._reached.clear()

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._reached.wait()

    async def passed(self) -> None:
        self._reached.set()
        async with asyncio.timeout(DEADLINE_S):
            await self._open.wait()


class HoldingEngine:
    """An engine as it is, with points before its prefills, requests to decode, and swaps, and before the verdict."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.verdict = threading.Event()
        self.verdict.set()
        self.verdict_asked = threading.Event()
        self.points: defaultdict[str, Point] = defaultdict(Point)
        self.updates = 0
        """Swaps asked of the engine."""
        self.decodes: list[DecodeRequest] = []
        """All that were asked of it."""
        self.prefills: dict[str, tuple[PrefillRequest, PrefillResult]] = {}
        """By request, with what came of them."""
        self.answers: dict[str, SampleChunk] = {}
        """What it sampled so far, by sample."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        await self.points["prefill"].passed()
        result = await self._engine.prefill(request)
        self.prefills[request.request_id] = request, result
        return result

    async def decode_batches(
        self, request: DecodeRequest, flush_s: float = 1.0
    ) -> AsyncGenerator[list[SampleChunk], None]:
        self.decodes.append(request)
        await self.points["decode"].passed()
        async with aclosing(self._engine.decode_batches(request, flush_s)) as batches:
            async for chunks in batches:
                for chunk in chunks:
                    self._keep(request.sample_ids[chunk.sample_index], chunk)
                yield chunks

    def _keep(self, sample_id: str, chunk: SampleChunk) -> None:
        answer = self.answers.setdefault(sample_id, SampleChunk(chunk.sample_index))
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
        answer.versions += chunk.versions
        answer.finish_reason = chunk.finish_reason
        answer.cached_token_count = max(answer.cached_token_count, chunk.cached_token_count)

    def pace(self, step_s: float) -> None:
        """Make every step of an embedded engine take that much longer, so that a turn can be met half-way."""
        core = getattr(self._engine, "_core", None)
        if core is not None:  # vLLM is slow enough
            step = core.step
            core.step = lambda: (time.sleep(step_s), step())[1]

    def between_steps(self) -> AbstractContextManager[None]:
        """Within it an embedded engine takes no step, and does all else that it is asked to: it swaps, and aborts.

        So what is in flight stays there, however long anything takes.
        """
        core = getattr(self._engine, "_core", None)
        return nullcontext() if core is None else standstill.no_step(core)  # vLLM is slow enough

    async def update(
        self, version: PolicyVersion, tensors: Mapping[str, Any], verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        def judged(paused: PausedEngine) -> None:
            self.verdict_asked.set()
            if not self.verdict.wait(DEADLINE_S):
                raise TimeoutError("no verdict")
            verify(paused)

        self.updates += 1
        await self.points["update"].passed()
        return await self._engine.update(version, tensors, judged)


class Wire:
    """A TCP port that leads to a worker's, as the address of its KV. It can be held after some bytes of answers."""

    def __init__(self, member: Any) -> None:
        self.member = member
        self.held = Point()
        self.limit_bytes: int | None = None
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.member.worker.identity.address = f"127.0.0.1:{port}"

    def hold_after(self, limit_bytes: int) -> None:
        """Let that many more bytes of answers through."""
        self.limit_bytes = limit_bytes
        self.held.close()

    def cut(self) -> None:
        """Break all connections; what comes now is let through again."""
        self.limit_bytes = None
        for writer in self._writers:
            writer.transport.abort()
        self.held.open()

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            host, _, port = self.member.address.rpartition(":")
            there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there[1])
        for source, sink, answers in ((reader, there[1], False), (there[0], writer, True)):
            task = asyncio.create_task(self._pump(source, sink, answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1024):
                if answers and self.limit_bytes is not None:
                    self.limit_bytes -= len(data)
                    if self.limit_bytes < 0:
                        await self.held.passed()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
