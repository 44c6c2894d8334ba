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
from pathlib import Path
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


def waited_s(native_id: int) -> float:
    """How long a thread of this process has waited for a processor in all; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Held:
    """How long a loop has been held, looked at once a tick.

    A machine that stands still stops both threads: what takes longer than two ticks does not count. On a busy one the
    loop's thread waits for a processor, which is no doing of its code's.
    """

    def __init__(self) -> None:
        self.blocked_s = 0.0
        """Since its last beat."""
        self._beats = -1
        self._waited_s = 0.0

    def look(self, beats: int, passed_s: float, waited_s: float) -> None:
        """`beats`: of the loop so far. `passed_s`: since the last look. `waited_s`: as the function says."""
        waited, self._waited_s = waited_s - self._waited_s, waited_s
        if beats != self._beats:
            self._beats, self.blocked_s = beats, 0.0
        elif passed_s < 2 * TICK_S:
            self.blocked_s = max(0.0, self.blocked_s + passed_s - waited)


class Watchdog:
    """Of one event loop."""

    def __init__(self, report_fd: int, limit_s: float, environments: str) -> None:
        """`environments`: names for the log."""
        self._report_fd = report_fd
        self._limit_s = max(2 * TICK_S, limit_s)
        self._environments = environments
        self._requests: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._beats = 0

    def start(self) -> None:
        """Watch the running loop from now on. It sees whose a task is by the request that made it."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        self._beat(loop)
        of_loop = loop, threading.get_ident(), threading.get_native_id()
        threading.Thread(target=self._watch, args=of_loop, name="watchdog", daemon=True).start()

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> Any:
        task = asyncio.Task(work, loop=loop, **more)
        self._requests[task] = request_of.get()
        return task

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beats += 1
        loop.call_later(TICK_S, self._beat, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int, native_id: int) -> None:
        held = Held()
        while held.blocked_s < self._limit_s:
            began_s = time.monotonic()
            time.sleep(TICK_S)
            held.look(self._beats, time.monotonic() - began_s, waited_s(native_id))
        self._end(loop, thread_id, held.blocked_s)

    def _end(self, loop: asyncio.AbstractEventLoop, thread_id: int, blocked_s: float) -> None:
        task = asyncio.current_task(loop)
        request = (request_of.get() if task is None else self._requests.get(task)) or 0
        frames = traceback.extract_stack(sys._current_frames()[thread_id])
        where = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"
        stack = "".join(traceback.format_list(frames))[-MAX_STACK_CHARACTERS:]
        log.error("environment_blocks", environment=self._environments, blocked_s=blocked_s, where=where, stack=stack)
        report = {"request": request, "blocked_s": blocked_s, "where": where[-300:]}  # six bytes each, at worst
        os.write(self._report_fd, json.dumps(report).encode()[:MAX_REPORT_BYTES])
        os._exit(BLOCKED_EXIT_CODE)
