"""What is reported of finished rollouts: references, small numbers, and to third parties their text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import tracing
from slipstream.runner.attempt import attempt_name
from slipstream.runner.envclient import ScoredSample
from slipstream.runner.rollout import Rollout
from slipstream.runner.spool import Rows
from slipstream.runner.traces import trace_id

MAX_ANSWER_BYTES = 4 << 20
CUTS = {
    "": runner_pb2.ROLLOUT_CUT_UNSPECIFIED,
    "turn": runner_pb2.ROLLOUT_CUT_TURN,
    "context": runner_pb2.ROLLOUT_CUT_CONTEXT,
    "turns": runner_pb2.ROLLOUT_CUT_TURNS,
    "tokens": runner_pb2.ROLLOUT_CUT_TOKENS,
}


@dataclass(frozen=True)
class Finished:
    """A member of a group that has its score."""

    index: int
    samples: Sequence[Rollout]
    score: ScoredSample
    prompt_text: str
    turn_count: int = 1
    conversations: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    """Of an episode: the messages of each sample."""
    cut: str = ""
    """Of an episode: the limit that ended it, as in `limits.Cut`; empty where its environment did."""


class Recorder:
    """Makes records, and the rows that they refer to."""

    def __init__(self, address: str, epoch: str) -> None:
        self._address = address
        self._epoch = epoch

    def record(
        self, assignment: runner_pb2.GroupAssignment, finished: Finished, rows: dict[str, Rows]
    ) -> runner_pb2.RolloutRecord:
        """The record of a rollout, and in `rows` what it refers to. Its first sample is in the record itself."""
        key = f"{attempt_name(assignment)}.{finished.index}"
        first, *further = finished.samples
        return runner_pb2.RolloutRecord(
            rollout_id=tracing.rollout_id(assignment.group_id, assignment.attempt, finished.index),
            sample_index=finished.index,
            trace_id=trace_id(assignment, finished.index),
            reward=finished.score.reward,
            correct=finished.score.correct,
            cached_token_count=sum(sample.cached_token_count for sample in finished.samples),
            prefix_query_token_count=sum(sample.prefix_query_token_count for sample in finished.samples),
            turn_count=finished.turn_count,
            role_rewards=_role_rewards(finished),
            cut=CUTS[finished.cut],
            further_samples=[
                runner_pb2.RolloutSample(**self._fields(f"{key}~{number}", sample, rows))
                for number, sample in enumerate(further, 1)
            ],
            **self._fields(key, first, rows),
        )

    def _fields(self, key: str, sample: Rollout, rows: dict[str, Rows]) -> dict[str, Any]:
        return {
            "prompt_token_count": sample.prompt_token_count,
            "token_count": len(sample.token_ids),
            "role": sample.role,
            "finish_reason": sample.finish_reason,
            "loss_ranges": [types_pb2.RowRange(start=start, end=end) for start, end in sample.sampled],
            "spans": sample.spans,
            "token_ids": self._refer(rows, f"t/{key}", "int32", sample.token_ids),
            "logprobs": self._refer(rows, f"l/{key}", "float32", sample.logprobs),
            "routes": sample.routes,
            **self._teacher(rows, key, sample),
        }

    def _teacher(self, rows: dict[str, Rows], key: str, sample: Rollout) -> dict[str, Any]:
        if not sample.teacher_logprobs:
            return {}
        return {"teacher_logprobs": self._refer(rows, f"q/{key}", "float32", sample.teacher_logprobs)}

    def _refer(self, rows: dict[str, Rows], key: str, dtype: str, values: list[Any]) -> types_pb2.RowsRef:
        # Every platform this runs on is little-endian with 4-byte "i" and "f"; servicer.py asserts it.
        data = array("i" if dtype == "int32" else "f", values).tobytes()
        rows[key] = Rows(data)
        return types_pb2.RowsRef(
            holder=self._address,
            holder_epoch=self._epoch,
            key=key,
            ranges=[types_pb2.RowRange(start=0, end=len(values))],
            dtype=dtype,
            size_bytes=len(data),
        )


def _role_rewards(finished: Finished) -> list[runner_pb2.RoleReward]:
    """Of the roles that have a sample: a turn that the engine refused may have left one without."""
    sampled = {sample.role for sample in finished.samples}
    return [
        runner_pb2.RoleReward(role=each.role, reward=each.reward, correct=each.correct, untrained=each.untrained)
        for each in finished.score.roles
        if each.role in sampled
    ]


def add_answers(
    report: runner_pb2.GroupReport, assignment: runner_pb2.GroupAssignment, group: Sequence[Finished]
) -> None:
    """Put what a third party wants to read into the report itself, within a bound."""
    if not assignment.HasField("prompt"):
        report.prompt = group[0].prompt_text
    for record, finished in zip(report.rollouts, group, strict=True):
        record.answer.text = finished.score.text
        if assignment.include_tokens:
            for sample in finished.samples:
                for start, end in sample.sampled:
                    record.answer.token_ids.extend(sample.token_ids[start:end])
                    record.answer.logprobs.extend(sample.logprobs[start:end])
    if sum(record.answer.ByteSize() for record in report.rollouts) > MAX_ANSWER_BYTES:
        for record in report.rollouts:
            record.answer.CopyFrom(runner_pb2.Answer(omitted=True))


def refs_of(report: runner_pb2.GroupReport) -> tuple[list[str], list[types_pb2.RowsRef]]:
    """Spool keys and route references of a report, for giving back what nobody needs."""
    samples = [sample for record in report.rollouts for sample in (record, *record.further_samples)]
    keys = [ref.key for sample in samples for ref in (sample.token_ids, sample.logprobs)]
    keys += [sample.teacher_logprobs.key for sample in samples if sample.HasField("teacher_logprobs")]
    routes = {(ref.holder, ref.key): ref for sample in samples for ref in sample.routes}
    return keys, list(routes.values())
