"""vLLM's processes as they start. vLLM itself waits for them for as long as they live."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress

import torch

from slipstream.common.exits import ServiceFailed
from slipstream.common.processes import with_children
from slipstream.engine.vllm.process import TELL, dying_with_us

TELL_S = 1.0
"""For a process to write where its threads stand."""


@contextmanager
def starting(threads: int, limit_s: float) -> Iterator[None]:
    """What is started within computes with so many threads, ends with this thread, and is up within `limit_s`.

    Else it is killed, and each of its processes, but for one that has only begun, writes on standard error where its
    threads stand.

    Raises:
        ServiceFailed: it was not up in time.
    """
    before = {process.pid for process in multiprocessing.active_children()}
    late = threading.Event()

    def end() -> None:
        late.set()
        begun = [process for process in multiprocessing.active_children() if process.pid not in before]
        for pid in [pid for process in begun if process.pid for pid in with_children(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, TELL)
        time.sleep(TELL_S)
        for process in begun:
            process.kill()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    try:
        with dying_with_us(), threads_of_operators(threads):
            timer.start()
            yield
    except Exception as error:
        if late.is_set():
            raise _late(limit_s) from error
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise _late(limit_s)


async def answered(answer: Awaitable[object], limit_s: float) -> None:
    """Wait for the first answer of what has started.

    Raises:
        ServiceFailed: it did not come in time.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            await answer
    except TimeoutError as error:
        if limit.expired():
            raise _late(limit_s) from error
        raise


@contextmanager
def threads_of_operators(count: int) -> Iterator[None]:
    """What is forked within computes with so many threads.

    It inherits what this thread was told, OpenMP having read its environment long ago. With more than one it would wait
    for ever for those with which this thread has computed before, as they are not forked.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _late(limit_s: float) -> ServiceFailed:
    return ServiceFailed(
        f"vLLM was not up within engine.start_timeout_s = {limit_s:g} s; where its processes stood is in the log above"
    )
