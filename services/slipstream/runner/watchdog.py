"""Sees from beside the event loop of an environment worker that code in it holds the loop, says whose it is, and ends
the process: everything else in it waits for that code, and would wait for good.

The request whose task runs then is written to a pipe for the runner, which fails that one alone; what else was open
here it begins again in another process. Code that holds the interpreter's lock, too, is given up by the runner when its
time is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import structlog

log = structlog.get_logger()

TICK_S = 0.1
BLOCKED_EXIT_CODE = 75
MAX_STACK_CHARACTERS = 4000
MAX_REPORT_BYTES = 4096
"""Less than a pipe takes at once."""

request_of: ContextVar[int] = ContextVar("request_of", default=0)
"""The number of the request that a task works for, set where a request is taken in; 0 for none."""


class Watchdog:
    """Of one event loop."""

    def __init__(self, report_fd: int, limit_s: float, environments: str) -> None:
        """`environments`: names for the log."""
        self._report_fd = report_fd
        self._limit_ticks = max(2, round(limit_s / TICK_S))
        self._environments = environments
        self._requests: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._beats = 0

    def start(self) -> None:
        """Watch the running loop from now on. It sees whose a task is by the request that made it."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        self._beat(loop)
        thread_id = threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, thread_id), name="watchdog", daemon=True).start()

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> Any:
        task = asyncio.Task(work, loop=loop, **more)
        self._requests[task] = request_of.get()
        return task

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beats += 1
        loop.call_later(TICK_S, self._beat, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        # Ticks are counted, not seconds: a machine that stands still, or is slow, stops both.
        seen, ticks = self._beats, 0
        while True:
            began_s = time.monotonic()
            time.sleep(TICK_S)
            if seen != self._beats:
                seen, ticks = self._beats, 0
            elif time.monotonic() - began_s < 2 * TICK_S:
                ticks += 1
            if ticks >= self._limit_ticks:
                self._end(loop, thread_id, ticks * TICK_S)

    def _end(self, loop: asyncio.AbstractEventLoop, thread_id: int, blocked_s: float) -> None:
        task = asyncio.current_task(loop)
        request = (request_of.get() if task is None else self._requests.get(task)) or 0
        frames = traceback.extract_stack(sys._current_frames()[thread_id])
        where = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"
        stack = "".join(traceback.format_list(frames))[-MAX_STACK_CHARACTERS:]
        log.error("environment_blocks", environment=self._environments, blocked_s=blocked_s, where=where, stack=stack)
        report = {"request": request, "blocked_s": blocked_s, "where": where[-1000:]}
        os.write(self._report_fd, json.dumps(report).encode()[:MAX_REPORT_BYTES])
        os._exit(BLOCKED_EXIT_CODE)
