"""What is kept of a finished rollout for people: text, tokens, versions, reward, times. Not its routes.

Documented in docs/operations.md, field by field.
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.runner.traces import trace_id

if TYPE_CHECKING:
    from slipstream.runner.records import Finished
    from slipstream.runner.rollout import Rollout


SESSION = "session"
"""What stands for the environment of a session."""


@dataclass(slots=True)
class Timings:
    """Where the time of a rollout went, in seconds, over all its turns. What is in none of them is ours: pauses before
    a turn is placed again, and members of the group that are waited for."""

    queue_s: float = 0.0
    """Waiting for a placement."""
    prefill_s: float = 0.0
    """The prefill worker's queue and its work."""
    decode_s: float = 0.0
    """From the request to a decode worker to the end of this sample."""
    tools_s: float = 0.0
    """The environment's steps between turns."""
    score_s: float = 0.0
    """The environment's verdict, for the whole group."""

    def add(self, other: Timings) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def rounded(self) -> dict[str, float]:
        return {each.name: round(getattr(self, each.name), 4) for each in fields(self)}


def records_of(
    assignment: runner_pb2.GroupAssignment, group: Sequence[Finished], total_s: float
) -> list[dict[str, Any]]:
    """One record a rollout. `total_s`: of the group, from its acquisition to its scores."""
    return [
        {
            "time_s": round(time.time(), 3),
            "group_id": assignment.group_id,
            "attempt": assignment.attempt,
            "sample": finished.index,
            **({"trace_id": trace} if (trace := trace_id(assignment, finished.index)) else {}),
            "purpose": runner_pb2.GroupPurpose.Name(assignment.purpose).removeprefix("GROUP_PURPOSE_").lower(),
            **_asked(assignment, finished),
            "dispatch_version": str(PolicyVersion.from_proto(assignment.dispatch_version)),
            "prompt": finished.prompt_text,
            "completion": finished.score.text,
            "reward": finished.score.reward,
            "correct": finished.score.correct,
            **({"detail": finished.score.detail} if finished.score.detail else {}),
            **({"roles": [asdict(each) for each in finished.score.roles]} if finished.score.roles else {}),
            "turns": finished.turn_count,
            **({"cut": finished.cut} if finished.cut else {}),
            **_sample(finished.samples[0]),
            **({"further_samples": [_sample(each) for each in finished.samples[1:]]} if finished.samples[1:] else {}),
            **({"conversations": finished.conversations} if finished.conversations else {}),
            "timings": {**_timings(finished).rounded(), "total_s": round(total_s, 4)},
        }
        for finished in group
    ]


def _asked(assignment: runner_pb2.GroupAssignment, finished: Finished) -> dict[str, Any]:
    """Which task it was; a session stands at the position of one that it never saw."""
    if assignment.HasField("session_group"):
        return {"environment": SESSION, "session_id": f"{assignment.session_group.name}-{finished.index}"}
    return {
        "environment": assignment.environment,
        "split": assignment.split,
        "task_index": assignment.task_index,
    }


def _sample(rollout: Rollout) -> dict[str, Any]:
    """One of a rollout's training samples."""
    return {
        **({"role": rollout.role} if rollout.role else {}),
        "finish_reason": types_pb2.FinishReason.Name(rollout.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "versions": [[span.token_count, str(PolicyVersion.from_proto(span.version))] for span in rollout.spans],
        "loss_ranges": [list(sampled) for sampled in rollout.sampled],
        "prompt_token_count": rollout.prompt_token_count,
        "cached_token_count": rollout.cached_token_count,
        "token_ids": rollout.token_ids,
        "logprobs_base64": _of_sampled(rollout, rollout.logprobs),
        **(
            {"teacher_logprobs_base64": _of_sampled(rollout, rollout.teacher_logprobs)}
            if rollout.teacher_logprobs
            else {}
        ),
    }


def _timings(finished: Finished) -> Timings:
    total = Timings()
    for each in finished.samples:
        total.add(each.timings)
    return total


def _of_sampled(rollout: Rollout, logprobs: Sequence[float]) -> str:
    """Those of the sampled tokens, in order, as little-endian float32: exact, and a tenth of the time of decimals."""
    values = array("f", [each for start, end in rollout.sampled for each in logprobs[start:end]])
    return base64.b64encode(values.tobytes()).decode()
