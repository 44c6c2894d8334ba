"""What is told while a run goes on, to somebody who may not listen."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from slipstream.launcher.display import LineDisplay, finish_telling
display = LineDisplay()
for number in range(3):
    display.say(str(number))
finish_telling()
print("went on", file=__import__("sys").stderr)
"""


def test_a_run_goes_on_when_its_output_finds_no_room() -> None:
    with Path("/dev/full").open("w") as full:
        told = subprocess.run([sys.executable, "-c", PROGRAM], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (told.returncode, told.stderr) == (0, "went on\n")


def test_a_run_goes_on_when_nobody_reads_its_output() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as telling:
        assert telling.stdout is not None
        assert telling.stderr is not None
        telling.stdout.close()
        assert telling.stderr.read() == "went on\n"
    assert telling.returncode == 0


ON_A_TERMINAL = """
import sys
from slipstream.launcher.display import PanelDisplay, finish_telling
display = PanelDisplay()
display.ready("router", 1, 2)
sys.stdin.readline()
display.say("its terminal is closed")
display.ready("runner-1", 2, 2)
display.close()
finish_telling()
print("went on", file=sys.stderr)
"""


def test_a_run_goes_on_when_its_terminal_is_closed() -> None:
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdin=subprocess.PIPE, stdout=its, stderr=subprocess.PIPE, text=True
    ) as telling:
        os.close(its)
        assert b"1 of 2" in _read_until(ours, b"1 of 2")
        os.close(ours)
        assert telling.communicate("\n", timeout=30)[1] == "went on\n"
    assert telling.returncode == 0


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    read = b""
    while wanted not in read:
        read += os.read(descriptor, 4096)
    return read
