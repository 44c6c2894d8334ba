"""Runs one group from assignment to report: prompt, turn, score, spool."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import SlipstreamError
from slipstream.common.version import PolicyVersion
from slipstream.runner import telemetry
from slipstream.runner.envclient import EnvironmentWorker, RenderedPrompt, ScoredSample, TaskKey
from slipstream.runner.spool import Rows, Spool
from slipstream.runner.turns import Sample, Turn, TurnClient, attempt_name

log = structlog.get_logger()

STOP = types_pb2.FINISH_REASON_STOP
EXTERNAL = runner_pb2.GROUP_PURPOSE_EXTERNAL
MAX_ANSWER_BYTES = 4 << 20


def task_of(assignment: runner_pb2.GroupAssignment) -> TaskKey:
    prompt = assignment.prompt if assignment.HasField("prompt") else None
    return TaskKey(assignment.environment, assignment.split, assignment.task_index, prompt)


class GroupRunner:
    """Runs groups. A bad rollout is data: whatever goes wrong in one becomes its report."""

    def __init__(
        self,
        environments: EnvironmentWorker,
        turns: TurnClient,
        spool: Spool,
        address: str,
        epoch: str,
        write_rollouts: Callable[[list[dict[str, Any]]], None],
        release_routes: Callable[[list[types_pb2.RowsRef]], None],
    ) -> None:
        self._environments = environments
        self._turns = turns
        self._spool = spool
        self._address = address
        self._epoch = epoch
        self._write_rollouts = write_rollouts
        self._release_routes = release_routes

    async def run(self, assignment: runner_pb2.GroupAssignment, prompt: RenderedPrompt) -> runner_pb2.GroupReport:
        """Run a group whose prompt is rendered. Cancelling the task frees the engines' blocks first."""
        started_s = time.monotonic()
        deadline_s = started_s + assignment.deadline_ms / 1000
        report = runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=assignment.group_id, attempt=assignment.attempt)
        )
        if not assignment.sampling.stop_token_ids:
            assignment.sampling.stop_token_ids.extend(prompt.stop_token_ids)
        try:
            turn = await self._turns.run(assignment, prompt.token_ids, deadline_s)
            scores, executions = await self._score(assignment, turn)
        except SlipstreamError as error:
            report.outcome = runner_pb2.GROUP_OUTCOME_FAILED
            report.reason, report.detail = error.reason, error.message[:4096]
        else:
            report.outcome = runner_pb2.GROUP_OUTCOME_FINISHED
            report.sandbox_execution_count = executions
            report.rollouts.extend(self._records(assignment, prompt, turn, scores))
            if assignment.purpose == EXTERNAL:
                _answer(report, assignment, prompt, turn, scores)
            telemetry.rollouts.labels(assignment.environment).inc(len(report.rollouts))
            self._write_rollouts(_lines(assignment, prompt, turn, scores))
        duration_s = time.monotonic() - started_s
        telemetry.group_duration.labels(assignment.environment).observe(duration_s)
        report.duration_ms = int(duration_s * 1000)
        return report

    async def _score(self, assignment: runner_pb2.GroupAssignment, turn: Turn) -> tuple[list[ScoredSample], int]:
        samples = [(sample.token_ids, sample.finish_reason == STOP) for sample in turn.samples]
        scored = False
        try:
            result = await self._environments.score(task_of(assignment), samples)
            scored = True
            return result
        finally:
            if not scored:  # failed or cancelled: nobody will ask for its routes
                self._release_routes([ref for sample in turn.samples for ref in _routes(turn, sample)])

    def _records(
        self,
        assignment: runner_pb2.GroupAssignment,
        prompt: RenderedPrompt,
        turn: Turn,
        scores: list[ScoredSample],
    ) -> list[runner_pb2.RolloutRecord]:
        prompt_count = len(prompt.token_ids)
        records = []
        for index, (sample, score) in enumerate(zip(turn.samples, scores, strict=True)):
            key = f"{attempt_name(assignment)}.{index}"
            token_count = prompt_count + len(sample.token_ids)
            records.append(
                runner_pb2.RolloutRecord(
                    rollout_id=f"{assignment.group_id}.{assignment.attempt}.{index}",
                    sample_index=index,
                    reward=score.reward,
                    correct=score.correct,
                    prompt_token_count=prompt_count,
                    token_count=token_count,
                    finish_reason=sample.finish_reason,
                    loss_ranges=[types_pb2.RowRange(start=prompt_count, end=token_count)],
                    spans=sample.spans,
                    token_ids=self._hold(f"t/{key}", "int32", prompt.token_ids + sample.token_ids),
                    logprobs=self._hold(f"l/{key}", "float32", [0.0] * prompt_count + sample.logprobs),
                    routes=_routes(turn, sample),
                    cached_token_count=turn.cached_token_count if index == 0 else 0,
                    prefix_query_token_count=prompt_count - 1 if index == 0 else 0,
                )
            )
        return records

    def _hold(self, key: str, dtype: str, values: list[Any]) -> types_pb2.RowsRef:
        # Every platform this runs on is little-endian with 4-byte "i" and "f"; servicer.py asserts it.
        data = array("i" if dtype == "int32" else "f", values).tobytes()
        self._spool.put(key, Rows(data))
        return types_pb2.RowsRef(
            holder=self._address,
            holder_epoch=self._epoch,
            key=key,
            ranges=[types_pb2.RowRange(start=0, end=len(values))],
            dtype=dtype,
            size_bytes=len(data),
        )


def _answer(
    report: runner_pb2.GroupReport,
    assignment: runner_pb2.GroupAssignment,
    prompt: RenderedPrompt,
    turn: Turn,
    scores: list[ScoredSample],
) -> None:
    """Put what a third party wants to read into the report itself, within a bound."""
    if not assignment.HasField("prompt"):
        report.prompt = prompt.text
    for record, sample, score in zip(report.rollouts, turn.samples, scores, strict=True):
        record.answer.text = score.text
        if assignment.include_tokens:
            record.answer.token_ids.extend(sample.token_ids)
            record.answer.logprobs.extend(sample.logprobs)
    if sum(record.answer.ByteSize() for record in report.rollouts) > MAX_ANSWER_BYTES:
        for record in report.rollouts:
            record.answer.CopyFrom(runner_pb2.Answer(omitted=True))


def _routes(turn: Turn, sample: Sample) -> list[types_pb2.RowsRef]:
    return [routes for routes in (turn.prompt_routes, sample.routes) if routes is not None]


def _lines(
    assignment: runner_pb2.GroupAssignment, prompt: RenderedPrompt, turn: Turn, scores: list[ScoredSample]
) -> list[dict[str, Any]]:
    """What `rollouts/*.jsonl` keeps of each sample."""
    return [
        {
            "time_s": round(time.time(), 3),
            "group_id": assignment.group_id,
            "attempt": assignment.attempt,
            "sample": index,
            "purpose": runner_pb2.GroupPurpose.Name(assignment.purpose).removeprefix("GROUP_PURPOSE_").lower(),
            "environment": assignment.environment,
            "task_index": assignment.task_index,
            "dispatch_version": str(PolicyVersion.from_proto(assignment.dispatch_version)),
            "prompt": prompt.text,
            "completion": score.text,
            "reward": score.reward,
            "correct": score.correct,
            "finish_reason": types_pb2.FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower(),
            "versions": [[span.token_count, str(PolicyVersion.from_proto(span.version))] for span in sample.spans],
        }
        for index, (sample, score) in enumerate(zip(turn.samples, scores, strict=True))
    ]


def refs_of(report: runner_pb2.GroupReport) -> tuple[list[str], list[types_pb2.RowsRef]]:
    """Spool keys and route references of a report, for giving back what nobody needs."""
    keys = [ref.key for record in report.rollouts for ref in (record.token_ids, record.logprobs)]
    routes = {(ref.holder, ref.key): ref for record in report.rollouts for ref in record.routes}
    return keys, list(routes.values())
