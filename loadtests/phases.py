"""What a finished run's own records say of its phases, and what perfect overlap of them would take.

Sources: the journal (groups acquired, steps sealed and trained, versions served), `rollouts/` (when a group gave its
place free), `timeline/` (training and publishing), `metrics.jsonl`. All times in Unix seconds, of one machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.launcher.records import read_json_lines
from slipstream.launcher.rollout_files import read_rollouts
from slipstream.orchestrator.journal import read_journal

Record = dict[str, Any]


@dataclass(frozen=True)
class Ideal:
    """Seconds a step keeps each resource busy, measured. None of them can be had in less.

    The trainer takes its steps one after another. A group keeps its place in the runner from dispatch to score, tool
    waits included. Every process shares the cores. Where all three overlap perfectly, a step takes as long as the one
    that is busy longest; a smaller step would need more of that resource, not more overlap.
    """

    trainer_s: float
    """From a sealed plan to weights ready to be published: rows, optimizer step, export."""

    generation_s: float
    """Time that the groups of one step hold a place, divided by the places there are."""

    cpu_s: float
    """Processor time of all processes, divided by the cores."""

    @property
    def step_s(self) -> float:
        return max(self.trainer_s, self.generation_s, self.cpu_s)

    @property
    def bound_by(self) -> str:
        return max(("trainer_s", "generation_s", "cpu_s"), key=lambda name: getattr(self, name)).removesuffix("_s")

    def reached(self, step_s: float) -> float:
        """Part of the ideal's throughput that a step of `step_s` has: a bad opponent does not improve it."""
        return self.step_s / step_s

    def hidden(self, synchronous_s: float, step_s: float) -> float:
        """Part of the time that overlap could save which it did save. A slow opponent makes this one look better."""
        if synchronous_s <= self.step_s:
            raise ValueError("a synchronous step faster than the ideal: the phases were measured wrongly")
        return (synchronous_s - step_s) / (synchronous_s - self.step_s)


@dataclass(frozen=True)
class Group:
    """One trained attempt: when it took its place and when it gave it free."""

    position: int
    step: int
    """Weights it was dispatched at."""
    started_s: float
    ended_s: float

    @property
    def held_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True)
class StepPhases:
    """Where one synchronous step's time goes: consecutive stretches, in seconds."""

    generate_s: float
    """Serving the weights to the plan sealed: dispatch, turns, tool waits, reports."""
    train_s: float
    """Plan sealed to weights ready: rows, optimizer step, export."""
    publish_s: float
    """Weights ready to version sealed at the broadcaster."""
    update_s: float
    """Version sealed to served by every worker: prefetch, pause, swap, check, probe."""

    @property
    def total_s(self) -> float:
        return self.generate_s + self.train_s + self.publish_s + self.update_s


class RunPhases:
    """The phases of one run directory."""

    def __init__(self, path: Path) -> None:
        journal = read_journal(path / "journal" / "journal.jsonl").records
        self.metrics = list(read_json_lines(path / "metrics.jsonl"))
        self.steps = {int(r["step"]): r for r in self.metrics if r["kind"] == "step"}
        self.sealed_s = {r["step"]: r["time_s"] for r in journal if r["kind"] == "sealed"}
        self._positions = {r["step"]: r["positions"] for r in journal if r["kind"] == "sealed"}
        self.trained_s = {r["step"]: r["time_s"] for r in journal if r["kind"] == "trained"}
        self.serving_s = {int(r["version"].split(".")[1]): r["time_s"] for r in journal if r["kind"] == "serving"}
        timeline = list(read_json_lines(path / "timeline" / "trainer.jsonl"))
        self.published_s = {r["step"]: (r["start_s"], r["end_s"]) for r in timeline if r["kind"] == "publish"}
        self.started_s = next(r["time_s"] for r in self.metrics if r["kind"] == "phase" and r["phase"] == "training")
        self.rollouts = [record for record in read_rollouts(path / "rollouts") if record["purpose"] == "training"]
        self.groups = _groups(journal, self.rollouts)
        self.evaluations = {r["name"]: float(r["accuracy"]) for r in self.metrics if r["kind"] == "evaluation"}
        self.cancelled_groups = sum(int(r["groups"]) for r in self.metrics if r["kind"] == "cancelled")

    @property
    def last_step(self) -> int:
        return max(self.trained_s)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that went through the loss."""
        return sum(int(step["loss_tokens"]) for step in self.steps.values())

    @property
    def training_wall_s(self) -> float:
        """From the first dispatch to the last step, fill and drain included."""
        return self.trained_s[self.last_step] - self.started_s

    @property
    def tokens_per_s(self) -> float:
        return self.trained_tokens / self.training_wall_s

    def step_s(self, first: int, last: int) -> float:
        """Mean wall time of steps `first` to `last`."""
        return (self.trained_s[last] - self.trained_s[first - 1]) / (last - first + 1)

    def phases(self) -> StepPhases:
        """Mean phases of a synchronous run, whose steps do not overlap."""
        parts = [
            StepPhases(
                generate_s=self.sealed_s[step] - self.serving_s[step - 1],
                train_s=self.published_s[step][0] - self.sealed_s[step],
                publish_s=self.published_s[step][1] - self.published_s[step][0],
                update_s=self.serving_s[step] - self.published_s[step][1],
            )
            # The first step's weights were served before the run began to train.
            for step in range(2, self.last_step + 1)
        ]
        return StepPhases(*(fmean(getattr(p, name) for p in parts) for name in StepPhases.__dataclass_fields__))

    def trainer_s(self) -> float:
        """Mean time from a sealed plan to weights ready."""
        return fmean(self.published_s[step][0] - self.sealed_s[step] for step in self.sealed_s)

    def trained_positions(self, first: int, last: int) -> list[int]:
        """Positions that steps `first` to `last` trained on."""
        return [position for step in range(first, last + 1) for position in self._positions[step]]

    def task_indexes(self) -> dict[int, int]:
        """The task of each position."""
        return {int(r["group_id"].removeprefix("train-")): int(r["task_index"]) for r in self.rollouts}

    def places_held(self) -> float:
        """Mean number of places in the runner that groups held while the run trained."""
        return sum(group.held_s for group in self.groups) / self.training_wall_s

    def lags(self) -> Counter[int]:
        """Trained groups by the versions they lagged."""
        counts: Counter[int] = Counter()
        for step in self.steps.values():
            counts.update({int(lag): count for lag, count in step["lag_counts"].items()})
        return counts

    def curve(self, window: int = 4) -> list[tuple[float, float]]:
        """(seconds since training began, accuracy) of each version: see `accuracy_curve`."""
        answers: defaultdict[int, list[bool]] = defaultdict(list)
        for rollout in self.rollouts:
            answers[int(rollout["dispatch_version"].split(".")[1])].append(rollout["correct"])
        return accuracy_curve(answers, self.serving_s, self.started_s, window)


def accuracy_curve(
    answers: Mapping[int, Sequence[bool]], serving_s: Mapping[int, float], started_s: float, window: int
) -> list[tuple[float, float]]:
    """(seconds since `started_s` until the version was served, accuracy) of each version.

    Accuracy is that of the training rollouts dispatched at the version, as sampled, with those of the `window - 1`
    versions before it, so the curve begins with version `window - 1`. When these rollouts ended does not matter: the
    version was that good once it was served.
    """
    points = []
    for version in sorted(v for v in answers if v >= window - 1):
        recent = [answer for v in range(version - window + 1, version + 1) for answer in answers.get(v, ())]
        points.append((serving_s[version] - started_s, fmean(recent)))
    return points


def reached_after_s(curve: Iterable[tuple[float, float]], accuracy: float) -> float | None:
    """When the curve first comes to `accuracy`; None if it never does."""
    return next((time_s for time_s, value in curve if value >= accuracy), None)


def percentile(counts: Mapping[int, int], fraction: float) -> int:
    """The smallest value that at least `fraction` of the counted do not exceed."""
    needed = fraction * sum(counts.values())
    seen = 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= needed:
            return value
    raise ValueError("nothing was counted")


def _groups(journal: Sequence[Record], rollouts: Iterable[Record]) -> list[Group]:
    ended = {(r["group_id"], r["attempt"]): r["time_s"] for r in rollouts}
    return [
        Group(r["position"], r["step"], r["time_s"], ended[key])
        for r in journal
        if r["kind"] == "acquired" and (key := (f"train-{r['position']}", r["attempt"])) in ended
    ]
