"""The one-file example learns what it is meant to learn."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from run_process import DEADLINE_S, SERVICES, environment

EXAMPLE = SERVICES.parent / "examples" / "smallest_loop.py"


@pytest.mark.timeout(590, func_only=False)
def test_the_smallest_loop_raises_accuracy():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = re.search(r"accuracy on held-out words: (\d+)% before, (\d+)% after", done.stdout)
    assert found, done.stdout
    before, after = (int(percent) for percent in found.groups())
    assert before < 60, "there must be something left to learn"
    assert after >= before + 25, done.stdout
    assert "lag at most 1" in done.stdout
    assert "lag at most 2" not in done.stdout, "the staleness bound holds"


def test_the_smallest_loop_stays_small():
    assert len(EXAMPLE.read_text().splitlines()) < 300
