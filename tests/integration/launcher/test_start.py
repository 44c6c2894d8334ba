"""What is told while processes start."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from slipstream.launcher import supervisor as module
from slipstream.launcher.errors import ServiceDiedError
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.supervisor import Supervisor


class Clock:
    """Stands in for `time`: stands still until it is set forward."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


async def test_a_start_that_takes_long_says_now_and_then_whom_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "READY_INTERVAL_S", 0.0)

    async def ready() -> bool:
        clock.now_s += 1.0
        return clock.now_s > 3.9 * module.WAITING_INTERVAL_S

    command = (sys.executable, "-c", "import time; time.sleep(60)")
    spec = ProcessSpec("decode-1", command, tmp_path / "log", tmp_path / "out", ready)
    told: list[list[str]] = []
    supervisor = Supervisor(stop_timeout_s=4.0)
    try:
        await supervisor.start([spec], on_waiting=told.append)
    finally:
        await supervisor.stop()
    assert told == [["decode-1"]] * 3


async def test_a_service_that_never_gets_ready_ends_the_start_with_its_name(tmp_path: Path):
    async def ready() -> bool:
        return False

    command = (sys.executable, "-c", "import time; time.sleep(60)")
    spec = ProcessSpec("trainer", command, tmp_path / "log", tmp_path / "out", ready)
    supervisor = Supervisor(start_timeout_s=0.5, stop_timeout_s=4.0)
    try:
        with pytest.raises(ServiceDiedError, match=r"^trainer was not ready within 0 s; its log is "):
            await supervisor.start([spec])
        (pid,) = supervisor.pids.values()
    finally:
        await supervisor.stop()
    assert not psutil.pid_exists(pid)
