"""What is told while processes start."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slipstream.launcher import supervisor as module
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.supervisor import Supervisor


async def test_a_start_that_takes_long_says_now_and_then_whom_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "WAITING_INTERVAL_S", 0.2)
    up_s = time.monotonic() + 1.0

    async def ready() -> bool:
        return time.monotonic() > up_s

    command = (sys.executable, "-c", "import time; time.sleep(60)")
    spec = ProcessSpec("decode-1", command, tmp_path / "log", tmp_path / "out", ready)
    told: list[list[str]] = []
    supervisor = Supervisor(stop_timeout_s=4.0)
    try:
        await supervisor.start([spec], on_waiting=told.append)
    finally:
        await supervisor.stop()
    assert 2 <= len(told) <= 6
    assert all(replicas == ["decode-1"] for replicas in told)
