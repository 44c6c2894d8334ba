"""Executions and the places they run on: waiting in line, output on its way, ends.

| queue | bound | on overflow |
|---|---|---|
| programs that run, wait, or whose output is being read | max_running_execs + max_waiting_execs | SANDBOX_QUEUE_FULL |
| output of one program on its way to its reader | the program's output limit | the program is killed |
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import structlog
from prometheus_client import Counter, Gauge, Histogram

from slipstream.common.errors import SandboxQueueFull
from slipstream.sandbox.place import Job, Place
from slipstream.sandbox.program import Ended, KillSwitch, Outcome, Program

log = structlog.get_logger()

running_execs = Gauge("slipstream_sandbox_running_execs", "Programs that run now.")
waiting_execs = Gauge("slipstream_sandbox_waiting_execs", "Programs that wait for a place.")
ended_execs = Counter("slipstream_sandbox_ended_execs", "Programs that ended.", ["outcome"])

exec_wall = Histogram(
    "slipstream_sandbox_exec_seconds",
    "From a program's start in its jail to its end.",
    buckets=(0.02, 0.05, 0.1, 0.5, 2, 10, 60, 600),
)

MAX_CHUNK_BYTES = 2**20


class ExecPool:
    """Places, and programs in line for them, first come first served."""

    def __init__(self, places: Sequence[Place], max_waiting: int) -> None:
        self.size = len(places)
        self.max_waiting = max_waiting
        self.ended_count = 0
        self.open: set[Execution] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._free = list(places)
        self._line: deque[asyncio.Future[Place | None]] = deque()

    @property
    def running_count(self) -> int:
        return self.size - len(self._free)

    @property
    def waiting_count(self) -> int:
        return sum(not future.done() for future in self._line)

    def admit(self, execution: Execution) -> None:
        """Let an execution in until `leave`. Raises `SandboxQueueFull`."""
        if len(self.open) >= self.size + self.max_waiting:
            raise SandboxQueueFull(
                f"{self.max_waiting} programs wait already (sandbox.max_waiting_execs)",
                name="sandbox.max_waiting_execs",
                limit=self.max_waiting,
            )
        self.open.add(execution)
        self._idle.clear()

    def leave(self, execution: Execution) -> None:
        self.open.discard(execution)
        if not self.open:
            self._idle.set()

    async def take(self, turn: asyncio.Future[Place | None]) -> Place | None:
        """A free place, when it is one's turn; None when `turn` was set so, to give up."""
        if self._free:
            place = self._free.pop()
            self._show()
            return place
        self._line.append(turn)
        self._show()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and (place := turn.result()) is not None:
                self.give(place)
            raise
        finally:
            if turn in self._line:
                self._line.remove(turn)
            self._show()

    def give(self, place: Place) -> None:
        """Put a place back, for whoever is next."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(place)
                break
        else:
            self._free.append(place)
        self._show()

    async def drain(self, patience_s: float) -> None:
        """Let programs end for `patience_s`, then kill those that are left."""
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            log.info("executions_cut_short", count=len(self.open))
        for execution in list(self.open):
            execution.stop(Outcome.CANCELLED)

    def _show(self) -> None:
        running_execs.set(self.running_count)
        waiting_execs.set(self.waiting_count)


class Execution:
    """One program, from the call that asks for it to its end; takes output from the place's thread."""

    def __init__(self, pool: ExecPool, program: Program) -> None:
        self._pool = pool
        self._program = program
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Future[Place | None] = self._loop.create_future()
        self._chunks: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._end: Ended | Exception | None = None
        self._stopped: Outcome | None = None
        self._kill: KillSwitch | None = None
        self.waited_s = 0.0

    async def events(self) -> AsyncGenerator[tuple[str, bytes] | Ended, None]:
        """Run the program; yields its output as it comes, then its end. Leaving early kills it."""
        self._pool.admit(self)
        asked_s = time.monotonic()
        try:
            place = await self._pool.take(self._turn)
            self.waited_s = time.monotonic() - asked_s
            if place is None:
                yield Ended(self._stopped or Outcome.CANCELLED)
                return
            self._start(place)
            while self._end is None or self._chunks:
                await self._wake.wait()
                self._wake.clear()
                while self._chunks:
                    yield self._next_chunk()
            if isinstance(self._end, Exception):
                raise self._end
            yield self._end
        finally:
            self.stop(Outcome.CANCELLED)
            self._pool.leave(self)

    def stop(self, reason: Outcome) -> None:
        """End the program, waiting or running; it then ends with `reason`."""
        self._stopped = self._stopped or reason
        if self._kill is not None:
            self._kill.pull(reason)
        elif not self._turn.done():
            self._turn.set_result(None)

    def _start(self, place: Place) -> None:
        try:
            self._kill = KillSwitch()
        except OSError:  # no more files may be open: the place is the next one's
            self._pool.give(place)
            raise
        if self._stopped is not None:
            self._kill.pull(self._stopped)

        def on_end(end: Ended | Exception) -> None:
            self._loop.call_soon_threadsafe(self._finish, place, end)

        place.submit(Job(self._program, self._kill, self, on_end))

    def _finish(self, place: Place, end: Ended | Exception) -> None:
        if self._kill is not None:
            self._kill.close()
        self._end = end
        self._wake.set()
        self._pool.ended_count += 1
        ended_execs.labels(end.outcome.value if isinstance(end, Ended) else "failed").inc()
        if isinstance(end, Ended):
            exec_wall.observe(end.wall_s)
        if isinstance(end, Exception):
            log.error("execution_failed", exc_info=end)
        self._pool.give(place)

    def _next_chunk(self) -> tuple[str, bytes]:
        """The next bytes of one stream: neighbours are joined, as messages cost more than bytes."""
        stream, data = self._chunks.popleft()
        parts, size = [data], len(data)
        while self._chunks and self._chunks[0][0] == stream and size + len(self._chunks[0][1]) <= MAX_CHUNK_BYTES:
            parts.append(self._chunks.popleft()[1])
            size += len(parts[-1])
        return stream, b"".join(parts)

    # On the place's thread.

    def write(self, stream: str, data: bytes) -> None:
        self._chunks.append((stream, data))

    def flush(self) -> None:
        if self._chunks:
            self._loop.call_soon_threadsafe(self._wake.set)
