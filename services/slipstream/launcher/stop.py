"""`slipstream stop`: end a run from another terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import tomllib

from slipstream.common.config import ConfigError
from slipstream.launcher.config import LauncherSection
from slipstream.launcher.lost import lost_sentence
from slipstream.launcher.metrics_records import read_json_lines, was_prepared
from slipstream.launcher.resume import writes_checkpoints
from slipstream.launcher.rundir import RunDir, is_fine_tuning, launcher_pid
from slipstream.launcher.session import ASKED_TO_STOP

REPORT_TIMEOUT_S = 10.0
"""What the launcher may take for the report, once everything has ended within its stop timeout."""


def stop_run(run: RunDir) -> int:
    """Ask the launcher to stop and wait for it; kill it if it does not, and its services die with it."""
    pid = launcher_pid(run)
    if pid is None:
        prepared = was_prepared(read_json_lines(run.events_file))
        elsewhere = "; what was started of it elsewhere ends there" if prepared else ""
        print(f"{run.name} is not running{elsewhere}")
        return 0
    wait_s = stop_timeout_s(run) + REPORT_TIMEOUT_S
    _signal(pid, ASKED_TO_STOP)
    if _ended(run, wait_s):
        print(f"{run.name} has stopped")
        _say_how_to_go_on(run)
        return 0
    _signal(pid, signal.SIGKILL)
    ended = _ended(run, 5.0)
    print(f"{run.name} did not stop within {wait_s:.0f} s and was killed" if ended else f"cannot stop {run.name}")
    return 1


def _say_how_to_go_on(run: RunDir) -> None:
    with contextlib.suppress(ConfigError):  # it may have ended before it wrote its configuration
        if is_fine_tuning(run):
            return
        if sentence := lost_sentence(run):
            print(sentence)
        if writes_checkpoints(run):
            print(f"it can go on: slipstream rl --resume {run.name}")


def stop_timeout_s(run: RunDir) -> float:
    """How long the run's own configuration lets it take."""
    try:
        return float(tomllib.loads(run.config_file.read_text())["launcher"]["stop_timeout_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return LauncherSection().stop_timeout_s


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
