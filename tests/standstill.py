"""Makes a process, or an embedded engine, stand still, and waits until it does.

The kernel tells one thread of a process to stop; the others go on until that one has run, which on a busy machine is
long enough for much of what they do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STANDS_STILL_S = 30.0
_STOPPED_OR_ENDED = frozenset("TtZX")


def stop(*pids: int) -> None:
    """Stop the processes; return once no thread of theirs runs. SIGCONT lets them go on."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + STANDS_STILL_S
    while not all(_stands_still(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            raise TimeoutError("a process that was stopped goes on")
        time.sleep(0.001)


@contextmanager
def no_step(core: Any) -> Iterator[None]:
    """An embedded engine's core takes no step meanwhile, and does all else that it is asked to."""
    step = core.step
    core.step = lambda: (time.sleep(0.001), True)[1]
    try:
        yield
    finally:
        core.step = step


def _stands_still(pid: int) -> bool:
    return all(_state(task) in _STOPPED_OR_ENDED for task in Path(f"/proc/{pid}/task").iterdir())


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended
        return "X"
