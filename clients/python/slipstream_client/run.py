"""The run as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.api.run.v1 import run_pb2
from slipstream_client.rollout import Version, version_of

_ENDED = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Accuracy:
    """One evaluation of one environment."""

    evaluation: str
    """"before", "after", or "step-N" of one beside training."""
    environment: str
    accuracy: float
    problem_count: int
    step: int
    sample_count: int = 1
    """Answers to each problem."""
    accuracy_low: float = 0.0
    """Ends of its 95 % interval; both 0 where it is not known."""
    accuracy_high: float = 0.0
    mean_reward: float = 0.0
    pass_at_k: dict[int, float] = field(default_factory=dict)
    """By k: the chance that one of k answers is right."""
    mean_token_count: float = 0.0
    truncated_fraction: float = 0.0
    """Part of the answers that were cut off at their bound."""
    unanswered_count: int = 0
    """Problems that the evaluation ended before."""
    oldest_version: Version | None = None
    """Of the weights that sampled any token of the answers."""
    newest_version: Version | None = None

    @classmethod
    def from_proto(cls, proto: run_pb2.Accuracy) -> Accuracy:
        return cls(
            evaluation=proto.evaluation,
            environment=proto.environment,
            accuracy=proto.accuracy,
            problem_count=proto.problem_count,
            step=proto.step,
            sample_count=proto.sample_count or 1,
            accuracy_low=proto.accuracy_low,
            accuracy_high=proto.accuracy_high,
            mean_reward=proto.mean_reward,
            pass_at_k=dict(proto.pass_at_k),
            mean_token_count=proto.mean_token_count,
            truncated_fraction=proto.truncated_fraction,
            unanswered_count=proto.unanswered_count,
            oldest_version=version_of(proto.oldest_version) if proto.HasField("oldest_version") else None,
            newest_version=version_of(proto.newest_version) if proto.HasField("newest_version") else None,
        )


@dataclass(frozen=True)
class WorkerVersion:
    """What one worker serves."""

    replica: str
    version: Version | None
    """None before its first weights."""
    state: str
    """"serving", "updating", "stale", "silent" (its engine does not move) or "away"."""

    @classmethod
    def from_proto(cls, proto: run_pb2.WorkerVersion) -> WorkerVersion:
        return cls(proto.replica, version_of(proto.version) if proto.HasField("version") else None, proto.state)


@dataclass(frozen=True)
class Run:
    """A run, as it was when it was sent."""

    run_id: str
    state: str
    """"running", "paused", "finished", "failed" or "stopped"."""
    phase: str
    reason: str
    """Why it is paused or ended, in one sentence."""
    step: int
    total_steps: int
    published: Version | None
    """The newest weights."""
    serving: Version | None
    """The weights that every worker serves at least."""
    metrics: dict[str, float] = field(default_factory=dict)
    accuracies: tuple[Accuracy, ...] = ()
    phase_fraction_done: float = 0.0
    """Part of the phase that is done, 0 to 1."""
    running_group_count: int = 0
    """Groups dispatched and not ended."""
    started_unix_s: float = 0.0
    """When the run began."""
    warnings: tuple[str, ...] = ()
    """What somebody should look at while it goes on, one sentence each."""
    workers: tuple[WorkerVersion, ...] = ()
    trained_group_counts: dict[str, int] = field(default_factory=dict)
    """Groups that were trained, by environment; those of sessions as "session"."""
    external_group_counts: dict[str, int] = field(default_factory=dict)
    """Groups of third parties that have ended, by environment; prompts of their own as "prompt"."""

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.state in _ENDED

    @classmethod
    def from_proto(cls, proto: run_pb2.Run) -> Run:
        return cls(
            run_id=proto.run_id,
            state=_state(proto.state),
            phase=proto.phase,
            reason=proto.reason,
            step=proto.step,
            total_steps=proto.total_steps,
            published=version_of(proto.published) if proto.HasField("published") else None,
            serving=version_of(proto.serving) if proto.HasField("serving") else None,
            metrics=dict(proto.metrics),
            phase_fraction_done=proto.phase_fraction_done,
            running_group_count=proto.running_group_count,
            started_unix_s=proto.started_unix_ms / 1000,
            warnings=tuple(proto.warnings),
            accuracies=tuple(map(Accuracy.from_proto, proto.accuracies)),
            workers=tuple(map(WorkerVersion.from_proto, proto.workers)),
            trained_group_counts=dict(proto.trained_group_counts),
            external_group_counts=dict(proto.external_group_counts),
        )


def _state(state: run_pb2.RunState) -> str:
    known = state in run_pb2.RunState.values()
    return run_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower() if known else "unknown"
