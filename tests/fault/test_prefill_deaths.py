"""Prefill workers are killed while a run trains: their turns go to the other one, and no group is lost or fails."""

from __future__ import annotations

import os
import signal

import pytest
from run_process import terminal_outcomes

pytestmark = pytest.mark.timeout(580, func_only=False)

KILLS = 2


def test_a_run_goes_on_over_the_deaths_of_its_prefill_workers_and_no_group_fails(launch):
    endless = ("--orchestrator.total-steps", "100000", "--launcher.restart", "on_failure")
    run = launch("run", "--prefill.replicas", "2", *endless)
    run.wait_step(2)
    for number in range(KILLS):
        replica = f"prefill-{number + 1}"
        pid, steps, updates = run.pid(replica), len(run.metrics("step")), len(run.metrics("update"))
        os.kill(pid, signal.SIGKILL)
        run.wait_until(lambda before=steps: len(run.metrics("step")) >= before + 2)

        def is_back(behind: int = updates, replica: str = replica) -> bool:
            return any(update["replica"] == replica for update in run.metrics("update")[behind:])

        run.wait_until(is_back)
        assert run.pid(replica) != pid
    assert len(run.events("service_died")) == KILLS
    assert run.slipstream("stop", "run").returncode == 0
    assert run.end() == 0, run.output
    assert run.metrics("group_failed") == []
    assert max(terminal_outcomes(run.journal())) == 1  # what ran when it was asked to stop has none
    assert [record for record in run.journal() if record["kind"] == "lost" or record.get("outcome") == "failed"] == []
    assert run.left_after() == []
