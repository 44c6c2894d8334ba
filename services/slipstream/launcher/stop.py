"""`slipstream stop`: end a run from another terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from slipstream.launcher.rundir import RunDir, launcher_pid

STOP_WAIT_S = 25.0
"""The launcher ends everything within its own stop timeout, 20 s unless configured; a little more than that."""


def stop_run(run: RunDir) -> int:
    """Ask the launcher to stop and wait for it; kill it if it does not, and its services die with it."""
    pid = launcher_pid(run)
    if pid is None:
        print(f"{run.name} is not running")
        return 0
    _signal(pid, signal.SIGTERM)
    if _ended(run, STOP_WAIT_S):
        print(f"{run.name} has stopped")
        return 0
    _signal(pid, signal.SIGKILL)
    ended = _ended(run, 5.0)
    print(f"{run.name} did not stop within {STOP_WAIT_S:.0f} s and was killed" if ended else f"cannot stop {run.name}")
    return 1


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.kill(pid, number)


def _ended(run: RunDir, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while launcher_pid(run) is not None:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True
