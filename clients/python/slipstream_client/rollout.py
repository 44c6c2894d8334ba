"""Groups of rollouts as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.api.types.v1 import types_pb2


class RolloutState(StrEnum):
    """Where a group stands."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """A state of a newer server."""


@dataclass(frozen=True, order=True)
class Version:
    """Policy weights: those after optimizer step `step`."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


@dataclass(frozen=True)
class VersionSpan:
    """Consecutive tokens sampled by the same weights."""

    token_count: int
    version: Version


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Empty: the model's end token."""
    seed: int = 0
    min_p: float = 0.0
    """Keeps tokens at least this many times as likely as the likeliest; 0 keeps all."""

    def to_proto(self) -> types_pb2.Sampling:
        return types_pb2.Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            min_p=self.min_p,
        )


@dataclass(frozen=True)
class Sample:
    """One finished rollout."""

    index: int
    text: str
    """What was sampled, without the end token."""
    reward: float
    """The environment's; 0 for a prompt of your own."""
    correct: bool
    finish_reason: str
    """"stop", "length" or "aborted"."""
    prompt_token_count: int
    token_count: int
    """Prompt and answer together."""
    versions: tuple[VersionSpan, ...]
    """Which weights sampled the answer, in order: more than one if they changed meanwhile."""
    token_ids: tuple[int, ...] = ()
    """Of the answer, if `include_tokens` was asked for."""
    logprobs: tuple[float, ...] = ()
    """The engine's log-probability of each of `token_ids` at temperature 1."""
    omitted: bool = False
    """Text and tokens are left out: the group's are too large for a message."""
    role_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of an environment with several roles, what it is worth for each."""
    trace_id: str = ""
    """Its trace at the run's collector and in `slipstream trace`; empty where it is not traced."""


@dataclass(frozen=True)
class Rollout:
    """A group of rollouts of one prompt, as it was when it was sent."""

    group_id: str
    state: RolloutState
    reason: str
    """Why it failed or was cancelled, for programs: "CONTEXT_TOO_LONG", "CLIENT" ..."""
    detail: str
    """The same for people."""
    environment: str
    """Empty for a prompt of your own."""
    prompt: str
    """The task's prompt as text, once finished; empty for a prompt of your own."""
    dispatch_version: Version | None
    """The weights served when it was started; None before."""
    samples: tuple[Sample, ...]
    """Empty until it has finished."""
    labels: dict[str, str] = field(default_factory=dict)
    sequence: int = 0
    """Grows with every change of any group: what `watch_rollouts` goes on from."""
    trace_id: str = ""
    """The trace of what its rollouts share, linked to each one's own; empty before it runs, and where it is not."""

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.state in (RolloutState.FINISHED, RolloutState.FAILED, RolloutState.CANCELLED)

    @classmethod
    def from_proto(cls, proto: rollout_pb2.Rollout) -> Rollout:
        return cls(
            group_id=proto.group_id,
            state=_STATES.get(proto.state, RolloutState.UNKNOWN),
            reason=proto.reason,
            detail=proto.detail,
            environment=proto.environment,
            prompt=proto.prompt,
            dispatch_version=version_of(proto.dispatch_version) if proto.HasField("dispatch_version") else None,
            samples=tuple(_sample(record) for record in proto.records),
            labels=dict(proto.labels),
            sequence=proto.sequence,
            trace_id=proto.trace_id,
        )


_STATES = {
    rollout_pb2.ROLLOUT_STATE_QUEUED: RolloutState.QUEUED,
    rollout_pb2.ROLLOUT_STATE_RUNNING: RolloutState.RUNNING,
    rollout_pb2.ROLLOUT_STATE_FINISHED: RolloutState.FINISHED,
    rollout_pb2.ROLLOUT_STATE_FAILED: RolloutState.FAILED,
    rollout_pb2.ROLLOUT_STATE_CANCELLED: RolloutState.CANCELLED,
}
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORTED: "aborted",
}


def version_of(proto: types_pb2.PolicyVersion) -> Version:
    """The plain value."""
    return Version(proto.incarnation, proto.step)


def _sample(record: runner_pb2.RolloutRecord) -> Sample:
    return Sample(
        index=record.sample_index,
        text=record.answer.text,
        reward=record.reward,
        correct=record.correct,
        finish_reason=_FINISH_REASONS.get(record.finish_reason, "unknown"),
        prompt_token_count=record.prompt_token_count,
        token_count=record.token_count,
        versions=tuple(VersionSpan(span.token_count, version_of(span.version)) for span in record.spans),
        token_ids=tuple(record.answer.token_ids),
        logprobs=tuple(record.answer.logprobs),
        omitted=record.answer.omitted,
        role_rewards={each.role: each.reward for each in record.role_rewards},
        trace_id=record.trace_id,
    )
