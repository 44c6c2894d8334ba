"""The pause before a restart: it grows with deaths soon after the start, and a process that ran long begins anew."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.launcher import supervisor as supervisor_module
from slipstream.launcher.errors import ServiceDiedError
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.supervisor import Supervisor


async def test_only_quick_deaths_in_a_row_lengthen_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    def on_event(kind: str, **fields: Any) -> None:
        if kind == "service_restart":
            delays.append(fields["delay_s"])
            ran_long = len(delays) == 3  # whatever comes next did
            monkeypatch.setattr(supervisor_module, "HEALTHY_AFTER_S", 0.0 if ran_long else 3600.0)

    supervisor = Supervisor(
        restart="on_failure", restart_budget=5, backoff_s=0.01, max_backoff_s=0.03, on_event=on_event
    )
    log = tmp_path / "log"
    spec = ProcessSpec("worker", (sys.executable, "-S", "-c", "raise SystemExit(1)"), log, log)

    async def start_and_watch() -> None:
        await supervisor.start([spec])
        await supervisor.watch()

    async with asyncio.timeout(60):
        with pytest.raises(ServiceDiedError, match="after 5 restarts"):
            await start_and_watch()
    await supervisor.stop()
    assert delays == [0.01, 0.02, 0.03, 0.0, 0.01]
