"""Bytes of a sealed version change on the broadcaster's disk: no worker serves them, and the next version heals."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from run_process import living_paths

pytestmark = pytest.mark.timeout(240, func_only=False)


def damage(path) -> None:
    """Turn over every byte of the second half of a file, in place."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        rest = file.read()
        file.seek(size // 2)
        file.write(bytes(byte ^ 0xFF for byte in rest))


@pytest.mark.parametrize("fault", ["other bytes", "cut short"])
def test_a_worker_that_refits_from_damaged_bytes_waits_for_the_next_version(fault, launch):
    run = launch(
        "run", "--decode.replicas", "2", "--orchestrator.total-steps", "100000", "--launcher.restart", "on_failure"
    )
    run.wait_step(3)
    assert run.slipstream("status", "run").returncode == 0
    damaged = 0
    for path in living_paths(run.path / "versions", "1.*/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # beyond its retention meanwhile
            if fault == "other bytes":
                damage(path)
            else:
                os.truncate(path, path.stat().st_size // 2)
            damaged += 1
    assert damaged > 0
    os.kill(run.pid("decode-2"), signal.SIGKILL)
    before, updates = len(run.metrics("step")), len(run.metrics("update"))
    run.wait_until(lambda: len(run.metrics("step")) >= before + 3, 90)
    run.wait_until(lambda: any(u["replica"] == "decode-2" for u in run.metrics("update")[updates:]), 90)
    assert run.process.poll() is None
