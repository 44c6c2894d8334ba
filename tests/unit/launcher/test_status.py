"""The table of `slipstream status`."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.launcher.rundir import RunDir
from slipstream.launcher.status import ServiceStatus, print_status


def test_a_long_load_cuts_no_name_short(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ServiceStatus("orchestrator", "127.0.0.1:7000", "serving"),
        ServiceStatus("prefill-1", "127.0.0.1:7001", "away"),
    ]
    rows[0].load = "training, step 12/2000, " + "and more, " * 20
    rows[0].notes.append("3 groups were filtered")
    print_status(RunDir(Path("runs/demo")), rows)
    shown = capsys.readouterr().out
    assert {line.split()[0] for line in shown.splitlines() if line.split()} >= {"orchestrator", "prefill-1"}
    assert "127.0.0.1:7001" in shown
    assert shown.endswith("3 groups were filtered\n")
