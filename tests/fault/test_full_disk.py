"""The disk fills up while a run trains: it pauses with a sentence, loses nothing, and goes on when there is room."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter

import pytest
from run_process import GROUPS_PER_STEP, PREFILLING, gated_after, terminal_outcomes

pytestmark = pytest.mark.timeout(540, func_only=False)

MIB = 2**20
STEPS = 10
SAMPLES = 4
THRESHOLD = ("--orchestrator.disk.min-free-bytes", str(16 * MIB))
NO_THRESHOLD = ("--orchestrator.disk.min-free-bytes", "0")


@pytest.fixture
def gate(tmp_path):
    """Without this file the run does not come to its end."""
    return tmp_path / "gate"


@pytest.fixture
def start(launch, small_disk, gate):
    def start(*arguments: str):
        disk = small_disk(96 * MIB)
        steps = ("--orchestrator.total-steps", str(STEPS))
        run = launch("run", *PREFILLING, *steps, *arguments, disk=disk, options=gated_after(STEPS - 2, gate))
        run.wait_step(2)
        return run, disk

    return start


def pauses(run) -> list[str]:
    return [record["state"] for record in run.metrics("run")]


def status(run) -> str:
    return run.slipstream("status", "run").stdout


def check_that_nothing_was_lost(run) -> None:
    assert run.end() == 0, run.output
    assert run.events("service_died") == []
    assert len(run.metrics("step")) == STEPS
    journal = run.journal()
    assert [record["n"] for record in journal] == list(range(len(journal)))
    assert terminal_outcomes(journal) == {1}
    assert [record["step"] for record in journal if record["kind"] == "trained"] == list(range(1, STEPS + 1))

    logged = Counter((line["group_id"], line["attempt"]) for line in run.rollouts())
    assert set(logged.values()) == {SAMPLES}
    trained = {
        (f"train-{position}", attempt)
        for record in journal
        if record["kind"] == "sealed"
        for position, attempt in zip(record["positions"], record["attempts"], strict=True)
    }
    assert len(trained) == STEPS * GROUPS_PER_STEP
    assert trained <= logged.keys()
    assert (run.path / "checkpoints" / "final" / "model.safetensors").stat().st_size > 0
    assert run.report()["steps"] == STEPS


def test_below_the_threshold_the_run_pauses_and_goes_on_by_itself(start, gate):
    run, disk = start(*THRESHOLD)
    disk.fill(left_bytes=12 * MIB)
    run.wait_until(lambda: pauses(run)[-1:] == ["paused"])
    run.wait_until(lambda: "paused: the disk is full (DISK_FULL): " in run.output)
    shown = status(run)
    assert "paused: the disk is full (DISK_FULL): " in shown, shown
    assert "the run goes on when there is room" in shown
    before = len(run.metrics("step"))
    assert before < STEPS
    disk.fill()  # to the last page: what still has something to write waits, too
    time.sleep(2.0)
    disk.free()
    run.wait_until(lambda: pauses(run)[-2:] == ["paused", "running"])
    gate.touch()
    check_that_nothing_was_lost(run)
    assert "the run goes on" in run.output


def test_without_a_threshold_writes_that_find_no_room_wait_for_it(start, gate):
    run, disk = start(*NO_THRESHOLD)
    disk.fill()
    run.wait_until(lambda: "paused: the disk is full (DISK_FULL): " in run.output)
    shown = status(run)
    said = re.search(r"paused: the disk is full \(DISK_FULL\): (\d+) MiB are free", shown)
    assert said is not None, shown
    assert int(said[1]) < 8, "what was begun and did not fit is removed, a few MiB"
    steps = len(run.metrics("step"))
    assert steps < STEPS
    assert run.process.poll() is None
    for name in ("journal/journal.jsonl", "metrics.jsonl"):
        assert (run.path / name).read_bytes().endswith(b"\n"), f"a torn record in {name}"
    disk.free()
    gate.touch()
    check_that_nothing_was_lost(run)


def test_directories_that_somebody_removes_are_made_again(launch, gate):
    run = launch("run", "--orchestrator.total-steps", "8", options=gated_after(6, gate))
    run.wait_step(2)
    for name in ("timeline", "rollouts"):
        shutil.rmtree(run.path / name, ignore_errors=True)
    gate.touch()
    assert run.end() == 0, run.output
    assert len(run.metrics("step")) == 8
    assert any((run.path / "timeline").glob("*.jsonl"))
    assert run.rollouts()
