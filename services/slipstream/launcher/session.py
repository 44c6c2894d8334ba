"""From start to end of a run's processes, whichever way it ends: finished, failed, or told to stop.

| loop     | takes               | waits for               | unblocked by                        |
|----------|---------------------|-------------------------|-------------------------------------|
| `work`   | what the run is for | e.g. the run's end      | the orchestrator                    |
| `watch`  | exits of processes  | a death                 | the kernel                          |
| `signal` | SIGINT, TERM, HUP   | the first of them       | a person                            |
|          | SIGUSR1             |                         | `slipstream stop`                   |
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slipstream.launcher.errors import RunFailedError, ServiceDiedError
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.supervisor import Supervisor

ASKED_TO_STOP = signal.SIGUSR1
"""What `slipstream stop` sends: an end that was wanted, not an interruption."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ASKED_TO_STOP)

Signals = asyncio.Queue[signal.Signals]
"""Those that came, in order."""


@dataclass(frozen=True)
class Ending:
    """How a session ended."""

    exit_code: int
    sentence: str = ""
    """Why, when it did not simply finish."""
    stopped: bool = False
    """By `slipstream stop`."""


async def conduct(
    supervisor: Supervisor,
    stages: list[list[ProcessSpec]],
    work: Callable[[], Awaitable[None]],
    on_ready: Callable[[str], None] = lambda replica: None,
    on_stopping: Callable[[], None] = lambda: None,
    on_waiting: Callable[[list[str]], None] = lambda replicas: None,
    signals: Signals | None = None,
) -> Ending:
    """Start the stages one after another, do the work, stop everything; nothing is left running.

    `signals` are those of `stop_signals`, where somebody took them before.
    """
    async with stop_signals() if signals is None else contextlib.nullcontext(signals) as signalled:

        async def start_and_work() -> None:
            for stage in stages:
                await supervisor.start(stage, on_ready, on_waiting)
            watch = asyncio.ensure_future(supervisor.watch())
            task = asyncio.ensure_future(work())
            try:
                done, _ = await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
                for finished in (watch, task):  # a death explains a failed work, so it speaks first
                    if finished in done:
                        await finished
            finally:
                await _cancel(watch, task)

        ending = await _first(start_and_work, signalled)
        on_stopping()
        stopping = asyncio.ensure_future(supervisor.stop())
        impatient = asyncio.ensure_future(_second_signal(signalled, ending))
        await asyncio.wait({stopping, impatient}, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(stopping, impatient)
        return ending


async def _first(main: Callable[[], Awaitable[None]], signalled: Signals) -> Ending:
    running = asyncio.ensure_future(main())
    told = asyncio.ensure_future(signalled.get())
    try:
        await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            return Ending(0)
        number = told.result()
        if number == ASKED_TO_STOP:
            return Ending(0, stopped=True)
        return Ending(128 + number, f"stopped by {number.name}")
    except (ServiceDiedError, RunFailedError) as error:
        return Ending(1, str(error))
    finally:
        await _cancel(running, told)


async def _second_signal(signalled: Signals, ending: Ending) -> None:
    """Return at once when told again: whoever presses Ctrl-C twice does not want to wait for the drain."""
    while await signalled.get() != signal.SIGINT or ending.exit_code != 128 + signal.SIGINT:
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def stop_signals() -> AsyncIterator[Signals]:
    """Signals that end the session, from now until the block ends; a hang-up is none where `nohup` has it ignored."""
    received: Signals = asyncio.Queue(maxsize=16)
    loop = asyncio.get_running_loop()
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set[signal.Signals]()
    taken = [number for number in STOP_SIGNALS if number not in ignored]

    def receive(number: signal.Signals) -> None:
        if not received.full():
            received.put_nowait(number)

    for number in taken:
        loop.add_signal_handler(number, receive, number)
    try:
        yield received
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
