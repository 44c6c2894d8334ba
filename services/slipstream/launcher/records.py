"""Reads back what the services of a run wrote: metrics, timelines, rollouts, the launcher's own events."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.common.disk import with_older
from slipstream.common.tracing import SPAN
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.intervals import Interval
from slipstream.launcher.metrics_records import Record, is_number, read_json_lines, read_metrics
from slipstream.launcher.rollout_files import EVALUATIONS, read_rollouts
from slipstream.launcher.rundir import RunDir


def read_all(path: Path) -> list[Record]:
    """Records of a file and of the older ones that it became, oldest first."""
    return [record for file in with_older(path) for record in read_json_lines(file)]


def is_span(record: Record) -> bool:
    """Whether a line of the timeline is part of a trace."""
    return "trace" in record and "span" in record


def read_replica(path: Path) -> list[Record]:
    """A replica's timeline, oldest first, without lines that no service writes."""
    return [record for record in read_all(path) if _is_timed(record)]


def _is_timed(record: Record) -> bool:
    """Whether a line has a beginning and an end, and what says where it belongs is of the types that services write."""
    links = record.get("links", [])
    return (
        all(is_number(record.get(name)) for name in ("start_s", "end_s"))
        and all(isinstance(record.get(name, ""), str) for name in ("trace", "span", "parent", "rollout"))
        and isinstance(links, list)
        and all(isinstance(link, list) and [type(each) for each in link] == [str, str] for link in links)
    )


def read_timeline(directory: Path) -> tuple[dict[str, list[Record]], dict[str, list[Record]]]:
    """Intervals of work, and spans of traces, by replica; a line may be both.

    Where the oldest intervals of one replica are gone, so are those of the others: figures compare them.
    """
    work: dict[str, list[Record]] = {}
    spans: dict[str, list[Record]] = {}
    known_since_s = 0.0
    for path in sorted(directory.glob("*.jsonl")):
        lines = read_replica(path)
        if of_traces := [record for record in lines if is_span(record)]:
            spans[path.stem] = of_traces
        records = [record for record in lines if record.get("kind") != SPAN]
        if records or not lines:
            work[path.stem] = records
        if records and len(with_older(path)) > 1:
            known_since_s = max(known_since_s, min(float(record["start_s"]) for record in records))
    return {name: [r for r in records if float(r["end_s"]) >= known_since_s] for name, records in work.items()}, spans


def curve(steps: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """A figure over the steps that have it."""
    return [(float(step["step"]), float(step[key])) for step in steps if step.get(key) is not None]


@dataclass
class RunRecords:
    """Everything that the report is made from."""

    name: str
    config: Record
    metrics: list[Record]
    timeline: dict[str, list[Record]]
    evaluations: list[Record]
    """Rollouts of held-out problems; those of training are many, and not needed."""
    launcher: list[Record] = field(default_factory=list)
    spans: dict[str, list[Record]] = field(default_factory=dict[str, list[Record]])
    """Of traces, by replica."""

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.metrics if record.get("kind") == kind]

    @property
    def steps(self) -> list[Record]:
        """One record a step; of a step trained again after a restore, the last."""
        by_step = {int(record["step"]): record for record in self.of_kind("step")}
        return [by_step[step] for step in sorted(by_step)]

    def intervals(self, *kinds: str, replica: str | None = None) -> list[Interval]:
        """Busy intervals of these kinds, of one replica or of all."""
        return [
            (float(record["start_s"]), float(record["end_s"]))
            for name, records in self.timeline.items()
            if replica is None or name == replica
            for record in records
            if record.get("kind") in kinds
        ]

    @property
    def begun_s(self) -> float | None:
        """When the run began: a resumed one has had several launchers."""
        times = (float(record["time_s"]) for record in self.launcher if record.get("kind") == "run_started")
        return next(times, None)

    @property
    def ended_s(self) -> float | None:
        """When its newest launcher ended; of one that is at work, or was killed, nothing."""
        kinds = [record for record in self.launcher if record.get("kind") in ("run_started", "run_ended")]
        return float(kinds[-1]["time_s"]) if kinds and kinds[-1]["kind"] == "run_ended" else None


def count_steps(run: RunDir) -> int:
    """Steps trained, as the report counts them: what the launcher heard last may be older than a death."""
    metrics = read_metrics(run.path / "metrics.jsonl")
    return len(RunRecords(name=run.name, config={}, metrics=metrics, timeline={}, evaluations=[]).steps)


def read_run(run: RunDir) -> RunRecords:
    try:
        config = tomllib.loads(run.config_file.read_text(encoding="utf-8")) if run.config_file.exists() else {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirError(f"{run.config_file} cannot be read: {reason}") from None
    timeline, spans = read_timeline(run.path / "timeline")
    return RunRecords(
        name=run.name,
        config=config,
        metrics=read_metrics(run.path / "metrics.jsonl"),
        timeline=timeline,
        evaluations=list(read_rollouts(run.path / "rollouts", EVALUATIONS)),
        launcher=list(read_json_lines(run.events_file)),
        spans=spans,
    )
