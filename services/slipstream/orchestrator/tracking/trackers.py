"""The trackers themselves, behind one small interface. Each imports its library when it is made, on its own thread."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.common.disk import replace_file
from slipstream.orchestrator.tracking.config import AnyTracker, TensorBoardConfig, TrackioConfig, WandbConfig
from slipstream.orchestrator.tracking.figures import Point

_STEP = "policy_step"
"""What Weights & Biases draws figures over: its own counter would refuse an evaluation of an earlier step."""


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of the run."""

    run_id: str
    directory: Path

    def settings(self) -> dict[str, Any]:
        """The resolved configuration, which holds no secrets; empty where the launcher wrote none."""
        path = self.directory / "config.toml"
        return tomllib.loads(path.read_text()) if path.exists() else {}


class Tracker(Protocol):
    """Calls may block and raise; they come from one thread."""

    def log(self, point: Point) -> None: ...

    def close(self) -> None:
        """Hand over what is left."""
        ...


class TensorBoard:
    def __init__(self, config: TensorBoardConfig, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        generated: Any = event_pb2, summary_pb2
        self._event, self._summary = generated[0].Event, generated[1].Summary
        self._writer = EventFileWriter(str(config.directory or run.directory / "tensorboard"))

    def log(self, point: Point) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.figures.items()]
        self._writer.add_event(
            self._event(wall_time=point.time_s, step=point.step, summary=self._summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        import wandb

        # A run that is resumed goes on in the same place.
        names = run.directory / "wandb" / "slipstream-run-id"
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.run_id,
            id=names.read_text() if names.exists() else None,
            resume="allow",
            mode=config.mode,
            dir=str(run.directory),
            config=run.settings(),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        replace_file(names, self._run.id.encode())
        self._run.define_metric("*", step_metric=_STEP)
        self._teardown = wandb.teardown

    def log(self, point: Point) -> None:
        self._run.log({**point.figures, _STEP: point.step})

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits for the library's own process, which may not have written everything yet


class Trackio:
    def __init__(self, config: TrackioConfig, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=config.project,
            name=config.name or run.run_id,
            space_id=config.space_id,
            config=run.settings(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, point: Point) -> None:
        self._run.log(point.figures, step=point.step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[Any, TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def open_tracker(config: AnyTracker, run: TrackedRun) -> Tracker:
    """Import its library and begin; may take seconds, or for ever."""
    return _TRACKERS[config.type](config, run)
