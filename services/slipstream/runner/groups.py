"""Runs one group from assignment to report: prompt, turn, score, spool."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import SlipstreamError
from slipstream.runner import telemetry
from slipstream.runner.attempt import attempt_name
from slipstream.runner.envclient import EnvironmentWorker, RenderedPrompt, ScoredSample, TaskKey
from slipstream.runner.rollout import STOP, Rollout
from slipstream.runner.rollout_record import records_of
from slipstream.runner.spool import Rows, Spool
from slipstream.runner.turns import Conversation, TurnClient
from slipstream.runner.unfinished import Unfinished

log = structlog.get_logger()

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
    ) -> None:
        self._environments = environments
        self._turns = turns
        self._spool = spool
        self._address = address
        self._epoch = epoch
        self._write_rollouts = write_rollouts

    async def run(
        self, assignment: runner_pb2.GroupAssignment, prompt: RenderedPrompt, unfinished: Unfinished | None = None
    ) -> runner_pb2.GroupReport:
        """Run a group whose prompt is rendered; `unfinished` is what an earlier process left of it.

        A finished one is in the spool when this returns. Cancelling the task frees the engines' blocks first.
        """
        started_s = time.monotonic() - (unfinished.elapsed_s if unfinished else 0.0)
        deadline_s = started_s + assignment.deadline_ms / 1000
        report = runner_pb2.GroupReport(
            group=runner_pb2.GroupAttempt(group_id=assignment.group_id, attempt=assignment.attempt)
        )
        if not assignment.sampling.stop_token_ids:
            assignment.sampling.stop_token_ids.extend(prompt.stop_token_ids)
        conversation = self._turns.begin(assignment, prompt.token_ids, unfinished.resumed_count if unfinished else 0)
        rows: dict[str, Rows] = {}
        if unfinished is not None:
            telemetry.groups_taken_up.labels("started_over").inc()
        try:
            scores, executions = await self._converse(assignment, conversation, deadline_s)
        except SlipstreamError as error:
            report.outcome = runner_pb2.GROUP_OUTCOME_FAILED
            report.reason, report.detail = error.reason, error.message[:4096]
        else:
            report.outcome = runner_pb2.GROUP_OUTCOME_FINISHED
            report.sandbox_execution_count = executions
            report.rollouts.extend(self._records(assignment, conversation.rollouts, scores, rows))
            if assignment.purpose == EXTERNAL:
                _answer(report, assignment, prompt, conversation.rollouts, scores)
            telemetry.rollouts.labels(assignment.environment).inc(len(report.rollouts))
            total_s = time.monotonic() - started_s
            self._write_rollouts(records_of(assignment, prompt, conversation.rollouts, scores, total_s))
        duration_s = time.monotonic() - started_s
        telemetry.group_duration.labels(assignment.environment).observe(duration_s)
        report.duration_ms = int(duration_s * 1000)
        if rows:
            try:
                await self._spool.keep(attempt_name(assignment), report, rows)
            except asyncio.CancelledError:
                conversation.release_routes()
                raise
        return report

    async def _converse(
        self, assignment: runner_pb2.GroupAssignment, conversation: Conversation, deadline_s: float
    ) -> tuple[list[ScoredSample], int]:
        """All turns of a group, and their scores. An environment has one turn today."""
        ended = False
        try:
            await conversation.answer(deadline_s)
            samples = [(rollout.answer, rollout.finish_reason == STOP) for rollout in conversation.rollouts]
            asked_s = time.monotonic()
            result = await self._environments.score(task_of(assignment), samples)
            for rollout in conversation.rollouts:
                rollout.timings.score_s += time.monotonic() - asked_s
            ended = True
            return result
        finally:
            if not ended:  # failed or cancelled: nobody will ask for its routes
                conversation.release_routes()

    def _records(
        self,
        assignment: runner_pb2.GroupAssignment,
        rollouts: list[Rollout],
        scores: list[ScoredSample],
        rows: dict[str, Rows],
    ) -> list[runner_pb2.RolloutRecord]:
        """The records of a group, and in `rows` what they refer to."""
        records = []
        for index, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            key = f"{attempt_name(assignment)}.{index}"
            records.append(
                runner_pb2.RolloutRecord(
                    rollout_id=f"{assignment.group_id}.{assignment.attempt}.{index}",
                    sample_index=index,
                    reward=score.reward,
                    correct=score.correct,
                    prompt_token_count=rollout.prompt_token_count,
                    token_count=len(rollout.token_ids),
                    finish_reason=rollout.finish_reason,
                    loss_ranges=[types_pb2.RowRange(start=start, end=end) for start, end in rollout.sampled],
                    spans=rollout.spans,
                    token_ids=self._refer(rows, f"t/{key}", "int32", rollout.token_ids),
                    logprobs=self._refer(rows, f"l/{key}", "float32", rollout.logprobs),
                    routes=rollout.routes,
                    cached_token_count=rollout.cached_token_count,
                    prefix_query_token_count=rollout.prefix_query_token_count,
                )
            )
        return records

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


def _answer(
    report: runner_pb2.GroupReport,
    assignment: runner_pb2.GroupAssignment,
    prompt: RenderedPrompt,
    rollouts: list[Rollout],
    scores: list[ScoredSample],
) -> None:
    """Put what a third party wants to read into the report itself, within a bound."""
    if not assignment.HasField("prompt"):
        report.prompt = prompt.text
    for record, rollout, score in zip(report.rollouts, rollouts, scores, strict=True):
        record.answer.text = score.text
        if assignment.include_tokens:
            record.answer.token_ids.extend(rollout.token_ids[rollout.prompt_token_count :])
            record.answer.logprobs.extend(rollout.logprobs[rollout.prompt_token_count :])
    if sum(record.answer.ByteSize() for record in report.rollouts) > MAX_ANSWER_BYTES:
        for record in report.rollouts:
            record.answer.CopyFrom(runner_pb2.Answer(omitted=True))


def refs_of(report: runner_pb2.GroupReport) -> tuple[list[str], list[types_pb2.RowsRef]]:
    """Spool keys and route references of a report, for giving back what nobody needs."""
    keys = [ref.key for record in report.rollouts for ref in (record.token_ids, record.logprobs)]
    routes = {(ref.holder, ref.key): ref for record in report.rollouts for ref in record.routes}
    return keys, list(routes.values())
