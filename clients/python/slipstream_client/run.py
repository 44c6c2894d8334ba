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
    """"before" or "after"."""
    environment: str
    accuracy: float
    problem_count: int
    step: int


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
            accuracies=tuple(
                Accuracy(one.evaluation, one.environment, one.accuracy, one.problem_count, one.step)
                for one in proto.accuracies
            ),
        )


def _state(state: run_pb2.RunState) -> str:
    known = state in run_pb2.RunState.values()
    return run_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower() if known else "unknown"
