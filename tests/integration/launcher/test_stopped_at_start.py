"""Who stops the command before anything of the run is up is told so in one line, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

SERVICES = Path(__file__).parents[3] / "services"
DEADLINE_S = 60.0

BLOCKS = """
import os, time
from pathlib import Path

class Blocks:
    def __init__(self, config, seed):
        file = Path("looked_at")
        file.with_suffix(".part").write_text(str(os.getpid()))
        file.with_suffix(".part").rename(file)
        time.sleep(3600)
"""
CONFIG = """
[sft]
enabled = false
[[environments]]
type = "import"
name = "blocks"
path = "blocks:Blocks"
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_stopped_while_it_looks_at_its_configuration(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS)
    (tmp_path / "run.toml").write_text(CONFIG)
    looked_at = tmp_path / "looked_at"
    with subprocess.Popen(
        # Whatever the tests themselves were started to ignore, as in the background of a shell.
        ["env", "--default-signal", sys.executable, "-m", "slipstream.launcher", "rl", "@", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SERVICES), str(tmp_path)])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            until(lambda: looked_at.exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate(timeout=DEADLINE_S)
            process.send_signal(number)
            said, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (process.returncode, said) == (128 + number, f"stopped by {number.name}\n")
    pid = int(looked_at.read_text())
    until(lambda: not psutil.pid_exists(pid))
    assert not (tmp_path / "runs").exists()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
