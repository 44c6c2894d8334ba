"""Runs whose environment, or what it needs, fails: they back off, and go on or end, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal

import pytest
from run_process import gated_after

from slipstream.algorithms.staleness import Outcome

pytestmark = pytest.mark.timeout(540, func_only=False)


def test_an_environment_that_only_fails_ends_the_run_with_code_1_and_one_sentence(launch):
    # Long enough for all the failures that it takes to back off, on whatever machine.
    run = launch("failing", "--orchestrator.failing-environment-timeout-s", "15", options="fails = true")
    assert run.end() == 1, run.output
    (sentence,) = [line for line in run.output.splitlines() if line.startswith("failing ended: ")]
    assert re.match(
        r"failing ended: \d+ groups of environment 'letters' failed in a row, the last with: "
        r"ArithmeticError: a bug of its own; traceback in logs/runner-1\.log",
        sentence,
    )
    assert "paused: environment 'letters' is backed off and tried now and then: " in run.output
    assert [record["state"] for record in run.metrics("environment")] == ["backed_off"]
    assert run.report()["state"] == "failed"
    assert run.left_after() == []


def test_a_sandbox_that_dies_and_comes_back_costs_no_group(launch, tmp_path):
    gate = tmp_path / "gate"
    run = launch(
        "sandboxed",
        "--launcher.restart", "on_failure", "--orchestrator.total-steps", "6", "--orchestrator.min-reward-std", "0",
        options=f"sandbox_s = 0.2\n{gated_after(4, gate)}",
    )  # fmt: skip
    run.wait_step(1)
    os.kill(run.pid("sandbox"), signal.SIGKILL)
    gate.touch()
    assert run.end() == 0, run.output
    ends = [record["outcome"] for record in run.journal() if record["kind"] == "ended"]
    assert Outcome.FAILED not in ends
    assert run.metrics("group_failed") == []
    assert run.left_after() == []
