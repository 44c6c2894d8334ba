"""Experiment trackers: what they are shown, and that none of them can hold the run up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.common.config import ConfigError
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.tracking.config import TensorBoardConfig, TrackioConfig, WandbConfig
from slipstream.orchestrator.tracking.feed import TrackerFeed, require_libraries
from slipstream.orchestrator.tracking.figures import Point, point_of
from slipstream.orchestrator.tracking.trackers import TrackedRun


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun("watched", tmp_path)


def write_run(run: TrackedRun, feed: TrackerFeed) -> None:
    metrics = MetricsFile(run.directory / "metrics.jsonl", time.time, follower=feed.take)
    metrics.write("phase", phase="training")
    for step in (1, 2, 3):
        metrics.write("step", step=step, loss=1.0 / step, reward_by_environment={"reverse": 0.25 * step}, text="x")
    metrics.write("evaluation", name="after", step=2, environment="reverse", accuracy=0.5, count=10)
    metrics.close()
    feed.finish()


def lost(tracker: str, reason: str) -> float:
    labels = {"tracker": tracker, "reason": reason}
    return REGISTRY.get_sample_value("slipstream_orchestrator_tracking_lost_total", labels) or 0.0


def test_tensorboard_reads_the_figures_of_steps_and_evaluations(run: TrackedRun):
    write_run(run, TrackerFeed([TensorBoardConfig()], run))
    events = EventAccumulator(str(run.directory / "tensorboard")).Reload()
    loss = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert loss == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [e.value for e in events.Scalars("train/reward_by_environment/reverse")] == [0.25, 0.5, 0.75]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/reverse")] == [(2, 0.5)]
    assert "train/text" not in events.Tags()["scalars"]


def logged(file: Path) -> bytes:
    """What the records of a LevelDB log say, put together over its blocks of 32 KiB, which cut them anywhere."""
    data, header_bytes, block_bytes, found = file.read_bytes(), 7, 32768, b""
    at = header_bytes  # the file's own
    while at + header_bytes <= len(data):
        left = block_bytes - at % block_bytes
        if left < header_bytes:
            at += left
            continue
        end = at + header_bytes + int.from_bytes(data[at + 4 : at + 6], "little")
        found += data[at + header_bytes : end]
        at = end
    return found


def test_weights_and_biases_offline_keeps_the_figures_and_a_resumed_run_its_name(run: TrackedRun):
    for _ in range(2):  # the run, and the same one resumed
        write_run(run, TrackerFeed([WandbConfig(mode="offline", finish_timeout_s=60)], run))
    files = list((run.directory / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    for name in (b"train/loss", b"train/reward_by_environment/reverse", b"evaluation/reverse"):
        assert all(name in logged(file) for file in files)


def of_trackio(directory: Path, metric: str) -> list[tuple[int, float]]:
    """Steps and values that the library's own command reads from its database."""
    command = ["get", "metric", "--project", "slipstream", "--run", "watched", "--metric", metric, "--json"]
    environment = {**os.environ, "TRACKIO_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-m", "trackio.cli", *command], check=True, capture_output=True, text=True, env=environment
    )
    return [(each["step"], each["value"]) for each in json.loads(done.stdout)["values"]]


def test_trackio_keeps_the_figures_and_a_resumed_run_goes_on(run: TrackedRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run.directory / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it looks for its directory when it is imported
    before = lost("trackio", "failed")
    for _ in range(2):  # the run, and the same one resumed
        write_run(run, TrackerFeed([TrackioConfig(finish_timeout_s=60)], run))
    assert lost("trackio", "failed") == before
    assert of_trackio(run.directory / "trackio", "train/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))] * 2
    assert of_trackio(run.directory / "trackio", "evaluation/reverse") == [(2, 0.5)] * 2


def test_records_without_figures_of_a_step_are_not_shown():
    assert point_of({"kind": "phase", "phase": "training", "time_s": 1.0}) is None
    assert point_of({"kind": "update", "step": 1, "time_s": 1.0, "pause_s": 0.1}) is None
    assert point_of({"kind": "step", "step": 4, "time_s": 2.5, "loss": 1, "lag_counts": {"0": 3}}) == Point(
        4, 2.5, {"train/loss": 1.0, "train/lag_counts/0": 3.0}
    )


HANGS_S = 100.0
BUSY_S = 30.0
"""What a busy machine may take: far from what whoever waits for a tracker that hangs would take."""


class Hanging:
    """A tracker whose server never answers."""

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def log(self, point: Point) -> None:
        self._released.wait(HANGS_S)

    def close(self) -> None:
        self._released.wait(HANGS_S)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_tracker_that_hangs_costs_its_records_and_a_bounded_end(run: TrackedRun, released: threading.Event):
    config = WandbConfig(queue_records=2, finish_timeout_s=0.3)
    before = lost("wandb", "dropped")
    feed = TrackerFeed([config, TensorBoardConfig()], run, lambda c, r: open_or_hang(c, r, released))
    metrics = MetricsFile(run.directory / "metrics.jsonl", time.time, follower=feed.take)
    started_s = time.monotonic()
    for step in range(20):
        metrics.write("step", step=step, loss=1.0)
    feed.finish()
    assert time.monotonic() - started_s < BUSY_S
    assert lost("wandb", "dropped") - before >= 17  # one is stuck, two wait
    assert len(EventAccumulator(str(run.directory / "tensorboard")).Reload().Scalars("train/loss")) == 20
    metrics.close()


def open_or_hang(config: WandbConfig | TensorBoardConfig | TrackioConfig, run: TrackedRun, released: threading.Event):
    from slipstream.orchestrator.tracking.trackers import open_tracker

    return Hanging(released) if isinstance(config, WandbConfig) else open_tracker(config, run)


def test_a_tracker_that_raises_loses_what_it_was_given_and_goes_on(run: TrackedRun):
    class Picky:
        taken: list[int] = []  # noqa: RUF012

        def log(self, point: Point) -> None:
            if point.step == 2:
                raise OSError("no route to host")
            self.taken.append(point.step)

        def close(self) -> None:
            raise RuntimeError("gone")

    before = lost("wandb", "failed")
    write_run(run, TrackerFeed([WandbConfig()], run, lambda config, run: Picky()))
    assert Picky.taken == [1, 3]
    assert lost("wandb", "failed") - before == 2  # step 2, and the evaluation of step 2


def test_a_library_that_is_not_installed_is_named_before_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TrackioConfig, "MODULE", "no_such_tracker")
    with pytest.raises(ConfigError, match=r"tracking\.1: trackio is not installed: pip install 'slipstream\[") as error:
        require_libraries([TensorBoardConfig(), TrackioConfig()])
    assert "no_such_tracker" in str(error.value)
