"""The example of a third party's program, run as it is against a whole stack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_process import DEADLINE_S, SERVICES, environment

from slipstream.launcher.ports import read_endpoints

pytestmark = pytest.mark.timeout(590, func_only=False)

EXAMPLE = SERVICES.parent / "examples" / "third_party_client.py"
DEMO = EXAMPLE.with_name("demo.toml")
CLIENT = SERVICES.parent / "clients" / "python"


def example(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{CLIENT}"
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_example_stays_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_example_creates_watches_and_cancels_rollouts_of_a_running_stack(launch, tmp_path):
    # What it cancels is of the first task, and does not end before that.
    gate = f'gate = "{tmp_path}/never"\ngated = [0]'
    run = launch("public", "--orchestrator.total-steps", "100000", command="up", options=gate)
    run.wait_up()
    run.wait_step(1)

    done = example("runs/public", "--groups", "2", "--samples", "3", directory=run.directory)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"run public: running, training, step \d+ of 100000", lines[0])
    assert lines[1] == "created 4 groups of letters, cancelled one of them"
    for index in range(2):
        start = lines.index(f"'held_out {index}\\n': finished")
        for line in lines[start + 1 : start + 4]:
            assert re.fullmatch(r"  ('|\").*('|\"): reward [01]\.\d\d, (stop|length), \d+ tokens of 1\.\d+.*", line)
    start = lines.index("'(own prompt)': finished")
    assert ": reward 0.00, " in lines[start + 1]
    assert lines[-1] == "cancelled: cancelled, reason CLIENT"

    # Beside the run: it goes on, and nothing that a third party asked for is trained on or kept.
    run.wait_step(run.metrics("step")[-1]["step"] + 2)

    def external() -> set[str]:
        return {line["group_id"] for line in run.rollouts() if line["purpose"] == "external"}

    run.wait_until(lambda: len(external()) >= 3)  # they are gathered for a while
    assert not external() & {f"train-{p}" for e in run.journal() if e["kind"] == "sealed" for p in e["positions"]}

    address = read_endpoints(run.path / "endpoints.toml")["orchestrator"]
    by_address = example(
        address, "--token-file", "runs/public/token", "--environment", "letters", "--groups", "1",
        directory=run.directory,
    )  # fmt: skip
    assert by_address.returncode == 0, by_address.stdout + by_address.stderr
    (run.directory / "wrong").write_text("wrong")
    refused = example(address, "--token-file", "wrong", directory=run.directory)
    assert (refused.returncode, refused.stderr) == (1, "error: the bearer token is wrong\n")
    unknown = example(address, "--token-file", "runs/public/token", "--environment", "lettres", directory=run.directory)
    assert (unknown.returncode, unknown.stderr) == (1, "error: no environment is called 'lettres'\n")
    missing = example("runs/nothing", directory=run.directory)
    assert missing.returncode == 2
    assert "runs/nothing is no run directory" in missing.stderr.splitlines()[-1]


def test_the_example_is_answered_by_the_demo(launch):
    run = launch("demo", "@", str(DEMO), "--orchestrator.total-steps", "100000", command="up")
    run.wait_up()
    done = example("runs/demo", "--groups", "2", "--samples", "2", directory=run.directory)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "created 4 groups of spell_backward, cancelled one of them" in lines
    assert sum(line.endswith(": finished") for line in lines) == 3
    assert lines[-1] == "cancelled: cancelled, reason CLIENT"
