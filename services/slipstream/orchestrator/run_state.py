"""Where the run stands: phase, state, newest figures, and the signal that wakes those who watch it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import structlog

from slipstream.algorithms.evaluation import Summary
from slipstream.api.run.v1 import run_pb2
from slipstream.common.errors import RunEnded
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.signals import Signal

log = structlog.get_logger()


class RunPhase(StrEnum):
    """What the run is doing."""

    STARTING = "starting"
    WARM_UP = "warm_up"
    EVALUATING_BEFORE = "evaluating_before"
    TRAINING = "training"
    EVALUATING_AFTER = "evaluating_after"
    ENDED = "ended"


ENDED_STATES = frozenset({run_pb2.RUN_STATE_FINISHED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_STOPPED})


CLIENT = "client"
"""The cause of a pause: PauseRun. It outlives the process."""
DISK = "disk"
"""The cause of a pause: the disk is full."""
ENVIRONMENTS = "environments"
"""The cause of a pause: all environments are backed off. Their probes still go."""


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """One environment's result in one evaluation."""

    evaluation: str
    environment: str
    accuracy: float
    problem_count: int
    step: int
    summary: Summary | None = None
    oldest: PolicyVersion = UNSET
    """Of the weights that sampled any token of the answers."""
    newest: PolicyVersion = UNSET
    unanswered: int = 0
    """Problems that the evaluation ended before."""


class RunState:
    """One run's public state. It ends once; later endings change nothing."""

    def __init__(self, run_id: str, total_steps: int, metrics: MetricsFile) -> None:
        self.run_id = run_id
        self.total_steps = total_steps
        self.state: run_pb2.RunState = run_pb2.RUN_STATE_RUNNING
        self.phase = RunPhase.STARTING
        self.reason = ""
        self.step = 0
        self.published = UNSET
        self.serving = UNSET
        self.metrics: dict[str, float] = {}
        self.accuracies: list[AccuracyResult] = []
        self.phase_fraction = 0.0
        self.pauses: dict[str, str] = {}
        self.warnings: dict[str, str] = {}
        """What somebody should look at while the run goes on: sentences by topic."""
        self.trainer_activity = ""
        """What the trainer said last that it is doing; empty before it said anything."""
        self.changed = Signal()
        self.running_groups: Callable[[], int] = lambda: 0
        self.waiting_figures: Callable[[], dict[str, float]] = dict
        """Of the step that comes next, at the moment of asking."""
        self.workers: Callable[[], list[run_pb2.WorkerVersion]] = list
        self.trained_groups: Mapping[str, int] = {}
        """By environment; sessions' under a name of their own."""
        self.external_groups: Mapping[str, int] = {}
        """Third parties' groups that have ended, by environment."""
        self._metrics_file = metrics
        self._started_ms = int(time.time() * 1000)
        self._training_since_s: float | None = None

    @property
    def trainer_disk_full(self) -> bool:
        """Whether the trainer waits for room, here or at the broadcaster."""
        return self.trainer_activity == "disk_full"

    @property
    def closed(self) -> bool:
        """Whether nothing at all may be handed out."""
        return bool(self.pauses.keys() - {ENVIRONMENTS})

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state in ENDED_STATES

    def refuse_ended(self, so: str) -> None:
        """Raise `RunEnded` once the run is over; `so`: what follows for the caller."""
        if self.ended:
            name = run_pb2.RunState.Name(self.state)
            raise RunEnded(f"the run has ended ({self.reason}); {so}", state=name)

    def enter(self, phase: RunPhase) -> None:
        """Go to the next phase."""
        if self.phase is phase or self.ended:
            return
        self.phase = phase
        self.phase_fraction = 0.0
        if phase is RunPhase.TRAINING and self._training_since_s is None:
            self._training_since_s = time.time()
        log.info("phase_entered", phase=phase.value)
        self._metrics_file.write("phase", phase=phase.value)
        self.changed.notify()

    def wait_in_training_s(self, wait_s: float, until_s: float) -> float:
        """Of a wait that ended at `until_s`, what lies in training: the first is also for workers and an evaluation."""
        since_s = self._training_since_s
        return wait_s if since_s is None else min(wait_s, max(0.0, until_s - since_s))

    def progress(self, fraction: float, **metrics: float) -> None:
        """Record how far the phase is, and newer figures."""
        self.phase_fraction = min(max(fraction, 0.0), 1.0)
        self.metrics.update(metrics)
        self.changed.notify()

    def pause(self, cause: str, reason: str) -> None:
        """Close admission for `cause`, until `resume(cause)`."""
        if self.ended or cause in self.pauses:
            return
        self.pauses[cause] = reason
        self.state = run_pb2.RUN_STATE_PAUSED
        log.warning("run_paused", cause=cause, reason=reason)
        self._metrics_file.write("run", state="paused", cause=cause, reason=reason)
        self.changed.notify()

    def resume(self, cause: str) -> None:
        """Undo `pause(cause)`; admission opens when no cause is left."""
        if self.pauses.pop(cause, None) is None or self.ended:
            return
        if not self.pauses:
            self.state = run_pb2.RUN_STATE_RUNNING
            log.info("run_resumed", cause=cause)
            self._metrics_file.write("run", state="running", cause=cause, reason="")
        self.changed.notify()

    def warn(self, topic: str, sentence: str, **fields: object) -> None:
        """Show a sentence until `unwarn(topic)`; the first of a topic stands. `fields` go into the records."""
        if topic in self.warnings or self.ended:
            return
        self.warnings[topic] = sentence
        log.warning("run_warning", topic=topic, sentence=sentence, **fields)
        self._metrics_file.write("warning", topic=topic, sentence=sentence, **fields)
        self.changed.notify()

    def unwarn(self, topic: str) -> None:
        """Undo `warn(topic)`."""
        if self.warnings.pop(topic, None) is not None:
            log.info("run_warning_over", topic=topic)
            self._metrics_file.write("warning_over", topic=topic)
            self.changed.notify()

    def end(self, state: run_pb2.RunState, reason: str) -> bool:
        """End the run; False when it had ended before."""
        if self.ended:
            return False
        self.enter(RunPhase.ENDED)
        self.state = state
        self.reason = reason
        self.phase_fraction = 1.0
        name = run_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower()
        log.info("run_ended", state=name, reason=reason)
        self._metrics_file.write("run", state=name, reason=reason)
        self.changed.notify()
        return True

    def to_proto(self) -> run_pb2.Run:
        """Return the run as others see it."""
        return run_pb2.Run(
            run_id=self.run_id,
            state=self.state,
            phase=self.phase.value,
            reason=self.reason or next(iter(self.pauses.values()), ""),
            step=self.step,
            total_steps=self.total_steps,
            published=_version(self.published),
            serving=_version(self.serving),
            metrics=self.metrics | self.waiting_figures(),
            accuracies=[_accuracy(result) for result in self.accuracies],
            workers=self.workers(),
            running_group_count=self.running_groups(),
            phase_fraction_done=self.phase_fraction,
            started_unix_ms=self._started_ms,
            warnings=list(self.warnings.values()),
            trained_group_counts=self.trained_groups,
            external_group_counts=self.external_groups,
        )


def _accuracy(result: AccuracyResult) -> run_pb2.Accuracy:
    shown = run_pb2.Accuracy(
        evaluation=result.evaluation,
        environment=result.environment,
        accuracy=result.accuracy,
        problem_count=result.problem_count,
        step=result.step,
        oldest_version=_version(result.oldest),
        newest_version=_version(result.newest),
        unanswered_count=result.unanswered,
    )
    if result.summary is not None:
        shown.sample_count = result.summary.samples_per_problem
        shown.accuracy_low, shown.accuracy_high = result.summary.accuracy_interval
        shown.mean_reward = result.summary.reward_mean
        shown.pass_at_k.update(result.summary.pass_at)
        shown.mean_token_count = result.summary.tokens_mean
        shown.truncated_fraction = result.summary.truncated_fraction
    return shown


def _version(version: PolicyVersion):  # noqa: ANN202 None leaves the field unset
    return version.to_proto() if version else None
