"""Runs one group from assignment to report: prompt or episodes, turns, scores, spool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common import tracing
from slipstream.common.errors import SlipstreamError
from slipstream.runner import telemetry
from slipstream.runner.attempt import attempt_name
from slipstream.runner.cut_turns import CutTurns
from slipstream.runner.envclient import RenderedPrompt, TaskKey
from slipstream.runner.envpool import EnvironmentPool
from slipstream.runner.episodes import EpisodeGroup
from slipstream.runner.records import Finished, Recorder, add_answers
from slipstream.runner.rollout import STOP
from slipstream.runner.rollout_record import records_of
from slipstream.runner.spares import spares_of
from slipstream.runner.spool import Rows, Spool
from slipstream.runner.teacher import TeacherClient
from slipstream.runner.traces import AttemptTraces
from slipstream.runner.turn_log import TurnLog
from slipstream.runner.turns import TurnClient
from slipstream.runner.unfinished import Unfinished

log = structlog.get_logger()

EXTERNAL = runner_pb2.GROUP_PURPOSE_EXTERNAL
TRAINING = runner_pb2.GROUP_PURPOSE_TRAINING


def task_of(assignment: runner_pb2.GroupAssignment) -> TaskKey:
    prompt = assignment.prompt if assignment.HasField("prompt") else None
    return TaskKey(assignment.environment, assignment.split, assignment.task_index, prompt)


class GroupRunner:
    """Runs groups. A bad rollout is data: whatever goes wrong in one becomes its report."""

    def __init__(
        self,
        environments: EnvironmentPool,
        turns: TurnClient,
        spool: Spool,
        address: str,
        epoch: str,
        write_rollouts: Callable[[list[dict[str, Any]]], None],
        teacher: TeacherClient | None = None,
    ) -> None:
        self._environments = environments
        self._turns = turns
        self._spool = spool
        self._recorder = Recorder(address, epoch)
        self._write_rollouts = write_rollouts
        self._cut_turns = CutTurns()
        self._teacher = teacher

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
        turn_log = TurnLog(self._spool, attempt_name(assignment), unfinished)
        rows: dict[str, Rows] = {}
        group: list[Finished] = []
        if unfinished is not None:
            telemetry.groups_taken_up.labels("resumed" if unfinished.turns else "started_over").inc()
        traces = AttemptTraces(assignment)
        try:
            play = self._play_turns if prompt.takes_turns else self._play
            with tracing.span("run", traces.group, group_id=assignment.group_id, sample_count=assignment.sample_count):
                group, executions = await play(assignment, prompt, deadline_s, report, turn_log)
                await self._judge(assignment, group)
        except SlipstreamError as error:
            report.outcome = runner_pb2.GROUP_OUTCOME_FAILED
            report.reason, report.detail = error.reason, error.message[:4096]
        else:
            report.outcome = runner_pb2.GROUP_OUTCOME_FINISHED
            report.sandbox_execution_count = executions
            report.rollouts.extend(self._recorder.record(assignment, finished, rows) for finished in group)
            if assignment.purpose == EXTERNAL:
                add_answers(report, assignment, group)
            telemetry.rollouts.labels(assignment.environment).inc(len(report.rollouts))
            telemetry.rollouts_given_up.labels(assignment.environment).inc(report.given_up_count)
            self._write_rollouts(records_of(assignment, group, time.monotonic() - started_s))
        duration_s = time.monotonic() - started_s
        telemetry.group_duration.labels(assignment.environment).observe(duration_s)
        report.duration_ms = int(duration_s * 1000)
        if rows:
            try:
                await self._spool.keep(attempt_name(assignment), report, rows)
            except asyncio.CancelledError:
                self._turns.release_routes(sample for finished in group for sample in finished.samples)
                raise
        return report

    async def _judge(self, assignment: runner_pb2.GroupAssignment, group: list[Finished]) -> None:
        """Have the teacher say how likely it finds what is to be trained on."""
        if self._teacher is None or not self._teacher.configured or assignment.purpose != TRAINING:
            return
        samples = [sample for finished in group for sample in finished.samples]
        judged = [finished.index for finished in group]
        try:
            with AttemptTraces(assignment).span("teacher", judged):
                await self._teacher.judge(samples, assignment.sampling.temperature)
        except BaseException:
            self._turns.release_routes(samples)
            raise

    async def _play(
        self,
        assignment: runner_pb2.GroupAssignment,
        prompt: RenderedPrompt,
        deadline_s: float,
        report: runner_pb2.GroupReport,
        turn_log: TurnLog,
    ) -> tuple[list[Finished], int]:
        """One turn for all, judged together; also how many sandbox executions that took."""
        conversation = self._turns.begin(assignment, prompt.token_ids, turn_log)
        ended = False
        try:
            spares = spares_of(assignment)
            await conversation.answer(deadline_s, spares)
            report.given_up_count = assignment.sample_count - len(conversation.rollouts)
            report.given_up_token_count = spares.token_count if spares is not None else 0
            samples = [(rollout.answer, rollout.finish_reason == STOP) for rollout in conversation.rollouts]
            asked_s = time.monotonic()
            scored = [index for index, _ in conversation.indexed]
            with AttemptTraces(assignment).span("score", scored):
                scores, executions = await self._environments.score(task_of(assignment), samples)
            for rollout in conversation.rollouts:
                rollout.timings.score_s += time.monotonic() - asked_s
            ended = True
        finally:
            if not ended:  # failed or cancelled: nobody will ask for its routes
                conversation.release_routes()
        rollouts = zip(conversation.indexed, scores, strict=True)
        return [Finished(index, [rollout], score, prompt.text) for (index, rollout), score in rollouts], executions

    async def _play_turns(
        self,
        assignment: runner_pb2.GroupAssignment,
        prompt: RenderedPrompt,
        deadline_s: float,
        report: runner_pb2.GroupReport,
        turn_log: TurnLog,
    ) -> tuple[list[Finished], int]:
        """An episode for each member. Those that failed are named in the report; raises what the first did if all."""
        task = task_of(assignment)
        episodes = EpisodeGroup(
            self._environments, self._turns, assignment, task, deadline_s, turn_log, self._cut_turns
        )
        finished: list[Finished] = []
        failures: list[SlipstreamError] = []
        for member in await episodes.run():
            if member.score is not None:
                text, score = member.prompt_text, member.score
                turns, said = member.turn_count, member.conversations
                finished.append(Finished(member.index, member.samples, score, text, turns, said, member.cut))
            elif member.failure is not None:
                failures.append(member.failure)
                report.failures.add(
                    sample_index=member.index, reason=member.failure.reason, detail=member.failure.message[:1024]
                )
            else:
                report.given_up_count += 1
                report.given_up_token_count += sum(sample.sampled_token_count for sample in member.samples)
        if not finished:
            raise failures[0]
        return finished, episodes.sandbox_executions
