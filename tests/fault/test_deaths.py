"""Kill -9 of anything ends the run soon, says what died, and leaves nothing behind: no process, no sandbox.

Nor a process that environment code has put into a session of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from run_process import PREFILLING, RunProcess, described, left_of, marked

pytestmark = pytest.mark.timeout(580, func_only=False)

PAIRS = [("orchestrator", "broadcaster"), ("router", "sandbox"), ("prefill-1", "decode-1"), ("runner-1", "trainer")]
"""One run for each, two at a time: starts and ends do not take both processors."""
PROGRAM_S = 590.0
"""Of the programs in the sandboxes: nobody waits for one of them."""
LEAVES_S = 98765
"""Of a process that environment code starts and leaves in a session of its own."""


Training = dict[str, tuple[RunProcess, str]]


@pytest.fixture
def training(launch: Callable[..., RunProcess], tmp_path: Path) -> Callable[..., Training]:
    """Starts runs side by side; each is in training once this returns, its groups are being judged in sandboxes.

    Of each name the run, and what marks those sandboxes.
    """

    def start(*names: str) -> Training:
        runs: Training = {}
        for name in names:
            marker = f"marker {tmp_path} {name}"
            pools = PREFILLING if name == "prefill-1" else ()
            options = f'sandbox_s = {PROGRAM_S}\nmarker = "{marker}"\nleaves = {LEAVES_S}'
            runs[name] = launch(name, *pools, options=options), marker
        for run, marker in runs.values():
            run.wait_until(lambda marker=marker: marked(marker))
            assert any(str(LEAVES_S) in command for command in map(described, run.processes()))
        return runs

    return start


@pytest.mark.parametrize("replicas", PAIRS, ids=" ".join)
def test_the_death_of_a_service_ends_the_run_with_one_sentence(replicas, training):
    for replica, (run, marker) in training(*replicas).items():
        dies(replica, run, marker)


def dies(replica: str, run: RunProcess, marker: str) -> None:
    os.kill(run.pid(replica), signal.SIGKILL)
    assert run.end() == 1
    sentences = [line for line in run.output.splitlines() if line.startswith(f"{replica} ended: ")]
    assert len(sentences) == 1, run.output
    assert sentences[0].startswith(
        f"{replica} ended: {replica} died (killed by SIGKILL); its log is {run.path}/logs/{replica}."
    )
    assert run.output.count("died") == 1
    assert "Traceback" not in run.output
    assert run.report()["state"] == "failed"
    assert run.left_after() == []
    assert left_of(lambda: marked(marker)) == []


def test_the_death_of_the_launcher_leaves_nothing(training):
    run, marker = training("run")["run"]
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    assert run.left_after() == []
    assert left_of(lambda: marked(marker)) == []
