"""When the run pauses for a full disk, with which sentence, and when it goes on."""

from __future__ import annotations

import json
import time

import pytest

from slipstream.api.run.v1 import run_pb2
from slipstream.orchestrator.config import DiskConfig
from slipstream.orchestrator.disk_watch import DiskWatch
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.run_state import RunState

MIB = 2**20


class Watched:
    """A run on a disk of 8 MiB that pauses below 2 MiB."""

    def __init__(self, disk, min_free_bytes: int) -> None:
        self.disk = disk
        self.metrics = MetricsFile(disk.path / "metrics.jsonl", time.time)
        self.state = RunState("run", 10, self.metrics)
        self.leases = RunnerLeases(10.0, time.monotonic)
        self.resumed_count = 0
        config = DiskConfig(min_free_bytes=min_free_bytes)
        self.watch = DiskWatch(config, disk.path, self.state, self.leases, [self.metrics], self._resumed)

    def _resumed(self) -> None:
        self.resumed_count += 1

    def reason(self) -> str:
        """Look; why the run is paused, or nothing."""
        self.watch.look()
        run = self.state.to_proto()
        assert (run.state == run_pb2.RUN_STATE_PAUSED) == bool(run.reason)
        return run.reason


@pytest.fixture
def watched(small_disk):
    made: list[Watched] = []

    def make(min_free_bytes: int) -> Watched:
        made.append(Watched(small_disk(8 * MIB), min_free_bytes))
        return made[-1]

    yield make
    for one in made:
        one.metrics.close()


def test_the_run_pauses_below_the_threshold_and_goes_on_well_above_it(watched):
    run = watched(2 * MIB)
    assert run.reason() == ""
    run.disk.fill(left_bytes=2 * MIB - 65536)
    assert "the disk is full (DISK_FULL): 2 MiB are free in " in run.reason()
    run.disk.free()
    run.disk.fill(left_bytes=2 * MIB + 65536)
    assert "2 MiB are needed" in run.reason(), "at the threshold it would stop again at once"
    assert run.resumed_count == 0
    run.disk.free()
    assert run.reason() == ""
    assert run.resumed_count == 1


def test_without_a_threshold_the_first_write_without_room_pauses_the_run_and_is_not_lost(watched):
    run = watched(0)
    run.disk.fill()
    for number in range(100):
        run.metrics.write("step", step=number)
    assert "the journal and the metrics find no room" in run.reason()
    run.disk.free()
    assert run.reason() == ""
    records = [json.loads(line) for line in (run.disk.path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(100))
    states = [(record["state"], record["cause"]) for record in records if record["kind"] == "run"]
    assert states == [("paused", "disk"), ("running", "disk")]


def test_a_runner_or_the_trainer_that_waits_for_room_pauses_the_run(watched):
    run = watched(0)
    runner = run.leases.renew("runner-1", "1")
    runner.disk_full = True
    assert "the rollouts of runner-1 find no room" in run.reason()
    runner.disk_full = False
    assert run.reason() == ""
    run.state.trainer_activity = "disk_full"
    assert "what the trainer made finds no room" in run.reason()
    run.state.trainer_activity = "training"
    assert run.reason() == ""


def test_a_runner_that_died_while_it_waited_holds_up_nobody(watched):
    run = watched(0)
    run.leases.ttl_s = 0.0
    runner = run.leases.renew("runner-1", "1")
    runner.disk_full = True
    assert run.reason()
    run.leases.expire()
    assert run.reason() == ""
