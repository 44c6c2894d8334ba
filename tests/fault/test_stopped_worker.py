"""A worker that stands still, as a machine does that swaps or a process under a debugger: lost, then back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests import standstill

pytestmark = pytest.mark.timeout(580, func_only=False)

STOPPED_S = float(os.environ.get("SLIPSTREAM_STOPPED_S", "12"))


def test_a_run_goes_on_while_a_worker_stands_still_and_takes_it_back(launch):
    run = launch("run", "--decode.replicas", "2", "--orchestrator.total-steps", "100000")
    run.wait_step(3)
    pid = run.pid("decode-2")
    standstill.stop(pid)
    try:
        stopped_s, before = time.monotonic(), len(run.metrics("step"))
        run.wait_until(lambda: len(run.metrics("step")) >= before + 3)
        run.wait_until(lambda: time.monotonic() - stopped_s > STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    behind = len(run.metrics("update"))

    def is_back() -> bool:
        return any(update["replica"] == "decode-2" for update in run.metrics("update")[behind:])

    run.wait_until(is_back)
    assert run.process.poll() is None
    assert run.pid("decode-2") == pid
