"""The side of an environment of a judge server (`judge_server.py`): asks it, and starts it again when it is gone."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

START_TIMEOUT_S = 60.0
MAX_LINE_BYTES = 16 * 2**20


Waiting = dict[int, asyncio.Future[list[dict[str, Any]]]]


class JudgeFailed(Exception):
    """The judge server cannot be started, or ended before it answered."""


class JudgeClient:
    """One judge server, started when it is first asked. Several groups may ask at once."""

    def __init__(self, module: str, *, cpu_s: float, memory_bytes: int, concurrency: int) -> None:
        """`cpu_s` and `memory_bytes`: what one answer may use. `concurrency`: groups judged at once."""
        self._module = module
        self._limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes}
        self._places = asyncio.Semaphore(concurrency)
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._waiting: Waiting = {}
        """For answers of the present process; one that takes its place has others."""
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def judge(self, answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A verdict for each answer; one that was not judged has `error`. Raises `JudgeFailed`."""
        async with self._places:
            process = await self._running()
            assert process.stdin is not None
            number, waiting = next(self._ids), self._waiting
            future = waiting[number] = asyncio.get_running_loop().create_future()
            request = {"id": number, "answers": list(answers), **self._limits}
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                return await future  # bounded by the processor time of its answers, and by the caller's deadline
            except ConnectionError:
                raise JudgeFailed("the judge server ended") from None
            finally:
                waiting.pop(number, None)

    async def close(self) -> None:
        """End the server. It ends by itself with the process that started it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", self._module),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=MAX_LINE_BYTES,
                )
                assert process.stdout is not None
                ready = False
                try:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        ready = bool(await process.stdout.readline())
                finally:
                    if not ready:
                        process.kill()
                        await process.wait()
                if not ready:
                    raise JudgeFailed(f"the judge server {self._module} does not start; the log says why")
                self._waiting = {}
                self._reading = asyncio.create_task(self._read(process, self._waiting))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process, waiting: Waiting) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            reply = json.loads(line)
            future = waiting.get(reply["id"])
            if future is not None and not future.done():
                future.set_result(reply["verdicts"])
        for future in waiting.values():
            if not future.done():
                future.set_exception(JudgeFailed("the judge server ended"))
        await process.wait()
