"""Kill -9 of anything ends the run soon, says what died, and leaves nothing behind: no process, no sandbox.

Nor a process that environment code has put into a session of its own.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from run_process import PREFILLING, described, marked

pytestmark = pytest.mark.timeout(180, func_only=False)

REPLICAS = ("orchestrator", "broadcaster", "router", "sandbox", "prefill-1", "decode-1", "runner-1", "trainer")
END_S = 30.0
LEFT_S = 98765
"""Of a process that environment code starts and leaves in a session of its own."""


@pytest.fixture
def training(launch, tmp_path, request):
    """A run in training whose groups are being judged in sandboxes, and what marks those."""
    marker = f"marker {tmp_path}"
    pools = PREFILLING if "prefill-1" in request.node.name else ()
    run = launch("run", *pools, options=f'sandbox_s = 100.0\nmarker = "{marker}"\nleaves = {LEFT_S}')
    run.wait_until(lambda: marked(marker))
    assert any(str(LEFT_S) in command for command in map(described, run.processes()))
    return run, marker


@pytest.mark.parametrize("replica", REPLICAS)
def test_the_death_of_a_service_ends_the_run_with_one_sentence(replica, training):
    run, marker = training
    begun_s = time.monotonic()
    os.kill(run.pid(replica), signal.SIGKILL)
    code = run.end(END_S)
    assert time.monotonic() - begun_s < END_S
    assert code == 1
    sentences = [line for line in run.output.splitlines() if line.startswith("run ended: ")]
    assert len(sentences) == 1, run.output
    assert sentences[0].startswith(
        f"run ended: {replica} died (killed by SIGKILL); its log is {run.path}/logs/{replica}."
    )
    assert run.output.count("died") == 1
    assert "Traceback" not in run.output
    assert run.report()["state"] == "failed"
    assert run.left_after(1.0) == []
    assert marked(marker) == []


def test_the_death_of_the_launcher_leaves_nothing(training):
    run, marker = training
    run.process.kill()
    assert run.end(5.0) == -signal.SIGKILL
    assert run.left_after(6.0) == []
    assert marked(marker) == []
