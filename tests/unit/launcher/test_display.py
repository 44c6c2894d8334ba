"""What is told while a run goes on, to somebody who may not listen."""

from __future__ import annotations

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
