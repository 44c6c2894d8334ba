"""The heart of the orchestrator: hands groups out, takes reports, seals steps. One thread, no I/O but the journal.

Training groups follow the staleness machine; evaluation and third-party groups pass by it, and come first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from slipstream.algorithms.staleness import AgeOut, Cancellation, Group, Outcome, Phase, SealedStep, StalenessMachine
from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.api.run.v1 import run_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator import telemetry
from slipstream.orchestrator.advantage import BadAdvantages, build_advantages
from slipstream.orchestrator.assignments import EVALUATION, EXTERNAL, TRAINING, Assigner
from slipstream.orchestrator.attempts import Attempt, RunningAttempts
from slipstream.orchestrator.breakers import Breakers
from slipstream.orchestrator.concurrency_gate import ConcurrencyGate
from slipstream.orchestrator.config import SESSION, EnvironmentConfig, OrchestratorConfig
from slipstream.orchestrator.curriculum import Curriculum
from slipstream.orchestrator.durations import Durations
from slipstream.orchestrator.evaluation import Evaluation
from slipstream.orchestrator.external import KIND, ExternalGroup, ExternalGroups
from slipstream.orchestrator.failures import BAD_ADVANTAGES, OUTAGES, TOO_FEW_MEMBERS, Failures
from slipstream.orchestrator.group_figures import GroupFigures
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.keeper import Worker
from slipstream.orchestrator.leases import AttemptKey, Runner, RunnerLeases
from slipstream.orchestrator.line import Line, Waiting
from slipstream.orchestrator.metrics import MetricsFile, StepInterval, Totals, finite, reward_fields
from slipstream.orchestrator.packed import packed
from slipstream.orchestrator.records import check_records
from slipstream.orchestrator.replay import KEPT_STEPS, History
from slipstream.orchestrator.role_rewards import role_reward_fields
from slipstream.orchestrator.run_state import DISK, RunPhase, RunState
from slipstream.orchestrator.sealer import ScoredGroup, SealedPlan, Sealer, has_advantages, record_rows
from slipstream.orchestrator.sessions import SessionGroup, Sessions
from slipstream.orchestrator.signals import Signal
from slipstream.orchestrator.skipped import NOT_FINITE, NOTHING_KNOWN, SkippedSteps
from slipstream.orchestrator.tasks import MixtureEntry, TaskSequence, group_id_of, position_of
from slipstream.orchestrator.traces import GroupTraces

log = structlog.get_logger()

# A runner fails a group at its deadline; one whose answer never reached a runner is given up a little later.
_DEADLINE_GRACE_S = 5.0
_REPORTS_REMEMBERED = 4096
# Well below the 16 MiB of a message: the last group taken, with a prompt of 1 MiB, may lie above.
_ACQUIRED_BYTES = 4 << 20


@dataclass(slots=True)
class ReportResult:
    """What became of a batch of reports."""

    refused: list[AttemptKey]
    unneeded: list[AttemptKey]


class Sequencer:
    """Owns the task sequence, the open groups and the sealed plans of a run."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        state: RunState,
        journal: Journal,
        metrics: MetricsFile,
        leases: RunnerLeases,
        release_rows: Callable[[Iterable[types_pb2.RowsRef]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.state = state
        self.leases = leases
        self.environments: dict[str, EnvironmentConfig] = {e.name: e for e in config.environments}
        self.tasks = task_sequence(config)
        self.machine = StalenessMachine(
            config.groups_per_step,
            config.max_off_policy_steps,
            config.total_steps,
            self.tasks.environment_of,
            over_sampling=config.over_sampling,
            age_out={e.name: AgeOut(e.age_out) for e in config.environments},
            quotas=config.quotas,
            quota_patience_groups=config.quota_patience_groups,
            max_ready_groups=config.max_ready_groups,
            total_positions=config.total_positions,
        )
        self.sealer = Sealer(
            min_group_size=config.min_group_size,
            min_reward_std=config.min_reward_std,
            advantages=build_advantages(config.advantage),
            micro_batch_tokens=config.micro_batch_tokens,
            data_ranks=config.data_ranks,
        )
        self._assigner = Assigner(
            config.run_id, config.kv_dtype, self.tasks, self.environments, config.samples_per_group
        )
        self.curriculum = Curriculum(self.tasks, self.environments)
        self.line = Line((SESSION, KIND))
        self.external = ExternalGroups(
            self.line,
            config.max_external_rollouts,
            config.kept_external_rollouts,
            config.kept_external_bytes,
            journal.append,
        )
        self.sessions = Sessions(
            config.sessions,
            config.samples_per_group,
            config.gateway_url,
            self.line,
            lambda session: journal.append("session", **session.as_record()),
        )
        self.evaluation: Evaluation | None = None
        self.admission_changed = Signal()
        """Notified when `acquire` may have something to give."""
        self.sealed = Signal()
        """Notified when a step is sealed or the run ends."""
        self.mirror_due = asyncio.Event()
        """Set when something changed that Redis shows."""
        self.incarnation = 1
        self.totals = Totals()
        self.breakers = Breakers(config.breaker, self.environments, clock, lambda key: key in self._running)
        self.machine.blocked = self.breakers.blocks
        self.concurrency = ConcurrencyGate(config.concurrency, config.shares, config.samples_per_group, metrics, clock)
        self.concurrency.backed_off = lambda: self.breakers.open
        self.failures = Failures(metrics, clock, self.breakers, state, journal)
        self.durations = Durations(self.machine.age_out, config.max_off_policy_steps, state, clock)
        self.group_figures = GroupFigures(
            [*self.environments, *([SESSION] if config.gateway_url else [])],
            clock,
            lambda group: SESSION if self.sessions.of_attempt(group.position, group.attempt) else group.environment,
        )
        self.traces = GroupTraces(clock)
        self.skipped = SkippedSteps(config.max_skipped_steps, config.run_dir / "skipped-rollouts.json")
        self.progress_at = clock()
        self.plans: dict[int, SealedPlan] = {}
        self._wanted_step = 0
        self._checkpoint_step: int | None = None
        self.released_step = 0
        """Rows of steps up to this one are gone."""
        self.lineage_step = 0
        """The last step that is taken on the lineage of the trainer that trains now: behind what was ever trained while
        a restored one takes steps once more."""
        self._served_before = UNSET
        """What an earlier process of this run dispatched at."""
        self._journal = journal
        self._metrics = metrics
        self._release_rows = release_rows
        self._clock = clock
        self._running = RunningAttempts()
        self._scored: dict[int, ScoredGroup] = {}
        self._reported: OrderedDict[AttemptKey, None] = OrderedDict()
        self._interval = StepInterval(clock())
        self._masked = frozenset(e.name for e in config.environments if e.age_out == "mask")
        state.running_groups = lambda: len(self._running)
        state.trained_groups, state.external_groups = self.totals.trained, self.external.counts
        state.waiting_figures = self._waiting_figures

    # ---- after a restart

    def resume(self, history: History) -> None:
        """Take up the run where an earlier process left it.

        Attempts that runners had are theirs until their leases end. What was ready to be trained counts as running:
        the references to its rows went with the process, and whoever has the rows reports it again.
        """
        machine = self.machine
        given_up = machine.restore(
            history.groups.values(),
            serving_step=history.serving.step,
            sealed_step=history.sealed_step,
            trained_step=history.trained_step,
            next_position=history.next_position,
            outcomes=history.outcomes,
        )
        self.incarnation, self.lineage_step = history.incarnation, history.lineage_step
        self._served_before = history.serving
        self._checkpoint_step, self.released_step = history.checkpoint_step, history.released_step
        self.plans = {step: history.plan(step) for step in history.sealed}
        self.totals.restore(history.totals)
        self.state.step = history.trained_step
        self.failures.restore(history.backed_off)
        surplus = self.config.over_sampling > 1.0
        self.durations.restore(history.durations, history.step_times_s, surplus=surplus)
        skipped = range(history.trained_step - history.skipped_in_a_row + 1, history.trained_step + 1)
        self.skipped.restore([self.plans[step] for step in skipped if step in self.plans])
        self.external.restore(history.external)
        self.external.counts.update(history.external_counts)
        self.curriculum.restore(history)
        self.sessions.restore(history.sessions.values(), {group.position: group.attempt for group in machine})
        self._give_up(given_up)
        for group in list(machine):
            if machine.reopened(group.position):
                self._journal.append("reopened", position=group.position, attempt=group.attempt)
            if group.phase is Phase.RUNNING:
                self.group_figures.known(group)
                dispatch = history.dispatches[group.position]
                assignment = self._assigner.training(
                    group, dispatch.version, self.curriculum.task_index(group.position)
                )
                if dispatch.sessions:
                    members = self.sessions.of_attempt(group.position, group.attempt)
                    if members is None:
                        self._lose(group.position, group.attempt)
                        continue
                    assignment = self._assigner.sessions(group, members, dispatch.version)
                attempt = Attempt(assignment, dispatch.runner_id, self._clock(), taken_up=True)
                self._running.add(attempt)
                self.leases.adopt(attempt.runner_id, [attempt.key])

    # ---- handing out

    @property
    def available(self) -> bool:
        """Whether `acquire` would hand something out."""
        if self.state.ended or self.state.closed or not self.state.serving:
            return False
        return self._evaluation_due or self._own_may_go or self._outside() is not None

    @property
    def _own_may_go(self) -> bool:
        return not self.config.sessions.only and self._room() >= self.config.samples_per_group

    def _outside(self, *, sessions: bool = True) -> Waiting | None:
        """The group from outside that goes next: one that trains is admitted as the run's own are.

        A larger one needs no more room than those, which would else take every place that came free before it.
        `sessions`: whether whoever asks can have them.
        """
        room, own = self._room() if sessions else 0, self.config.samples_per_group  # once: many may wait
        return self.line.first(lambda each: not each.trains or room >= own or each.rollout_count <= room)

    def _room(self) -> float:
        """Rollouts for which a position may be handed out, by staleness, what the engines hold, and breakers."""
        positions = self.state.phase is RunPhase.TRAINING and self.machine.dispatchable and self.breakers.any_allowed
        return self.concurrency.room(self.rollouts_in_flight) if positions else 0

    @property
    def rollouts_in_flight(self) -> int:
        """Rollouts that runners have."""
        return self._running.rollout_count

    def look_at_load(self, workers: Sequence[Worker]) -> None:
        """Let the limit of rollouts in flight follow what the workers that sample say."""
        if self.concurrency.look(workers, self.rollouts_in_flight):
            self.admission_changed.notify()

    @property
    def _evaluation_due(self) -> bool:
        """Whether a held-out task may be asked now: beside training, within the evaluation's share of the slots."""
        if self.evaluation is None:
            return False
        training = self.state.phase is RunPhase.TRAINING and self.machine.sealed_step < self.config.total_steps
        if not training:
            return self.evaluation.waiting
        slot_count = min(self.machine.admission_bound, sum(runner.slot_count for runner in self.leases.runners))
        return self.evaluation.may_take(slot_count, self.config.samples_per_group)

    def acquire(self, runner: Runner, max_groups: int) -> list[runner_pb2.GroupAssignment]:
        """Hand out up to `max_groups` groups: evaluations first, then what came from outside, then the run's own.

        Fewer where prompts of third parties are large: the answer must fit a message.
        """
        groups: list[runner_pb2.GroupAssignment] = []
        runner.slot_count = len(runner.attempts) + max_groups
        if runner.spool_full:
            return groups
        size_bytes = 0
        now = self._clock()
        while len(groups) < max_groups and size_bytes < _ACQUIRED_BYTES and self.available:
            group = self._next_group(runner)
            if group is None:
                self._seal_what_can_be()  # what could still come is blocked now
                break
            groups.append(group)
            size_bytes += group.ByteSize()
            attempt = Attempt(group, runner.runner_id, now)
            self._running.add(attempt)
            if group.purpose != EXTERNAL and not group.HasField("session_group"):
                self.breakers.handed_out(group.environment, attempt.key)
        self.leases.grant(runner, [(group.group_id, group.attempt) for group in groups])
        if groups:
            self.mirror_due.set()
        return groups

    def dispatch_versions(self) -> dict[str, str]:
        """Return the dispatch version of every attempt that runs, by group id."""
        return {attempt.assignment.group_id: str(attempt.version) for attempt in self._running}

    def running_versions(self) -> set[PolicyVersion]:
        """Return the dispatch versions of all attempts that run."""
        return self._running.versions

    def _next_group(self, runner: Runner) -> runner_pb2.GroupAssignment | None:
        version = self.state.serving
        if self.evaluation is not None and self._evaluation_due:
            return self._assigner.evaluation(*self.evaluation.take(), version, self.evaluation.config)
        outside = self._outside(sessions=bool(runner.address))
        if isinstance(outside, ExternalGroup):
            return self._assigner.external(self.external.take(outside, version), version)
        group = self.machine.dispatch() if outside is not None or self._own_may_go else None
        if group is None:
            return None
        of_sessions = isinstance(outside, SessionGroup)
        task_index = None if of_sessions else self.curriculum.task_index(group.position)
        self._journal.append(
            "acquired",
            position=group.position,
            attempt=group.attempt,
            step=group.dispatch_step,
            version=str(version),
            runner=runner.runner_id,
            **({"sessions": True} if of_sessions else {}),
            **({"task": task_index} if task_index is not None else {}),
        )
        if of_sessions:
            members = self.sessions.take(outside, group.position, group.attempt, runner.address, version)
            self.group_figures.dispatched(group)
            return self._assigner.sessions(group, members, version)
        self.group_figures.dispatched(group)
        return self._assigner.training(group, version, task_index)

    # ---- taking reports

    def report(self, runner: Runner, reports: Sequence[runner_pb2.GroupReport]) -> ReportResult:
        """Take a runner's reports of attempts that ended.

        Late ones, and those of attempts that another runner has, are refused; repeated ones have no further effect.
        Raises `InvalidRequest`, and takes none of them, when a record contradicts its group or itself.
        """
        newest = PolicyVersion(self.incarnation + 1, self.config.total_steps)
        for report in reports:
            attempt = self._running.get((report.group.group_id, report.group.attempt))
            if attempt is not None and attempt.runner_id == runner.runner_id:
                check_records(attempt.assignment, report, newest)
        result = ReportResult([], [])
        for report in reports:
            key = (report.group.group_id, report.group.attempt)
            attempt = self._running.get(key)
            if attempt is not None and attempt.runner_id != runner.runner_id:
                result.refused.append(key)
                continue
            self._remember(key)
            if attempt is None:
                if not self._taken_before(key):
                    self._acknowledge_everywhere(key)
                    result.refused.append(key)
                continue
            self._running.pop(key)
            self.leases.drop(attempt.runner_id, key)
            finished = report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
            of_task = attempt.assignment.purpose == TRAINING and not attempt.assignment.HasField("session_group")
            if finished and of_task and not attempt.taken_up:
                self.durations.ended(attempt.assignment.environment, self._clock() - attempt.started_at)
            self.totals.sandbox_executions += report.sandbox_execution_count
            self.totals.rollouts += len(report.rollouts)
            self._note_outcome(attempt, report)
            ended = runner_pb2.GroupOutcome.Name(report.outcome).removeprefix("GROUP_OUTCOME_").lower()
            self.traces.ended(attempt.assignment, attempt.started_at, ended, report)
            if not self._take(attempt, report):
                result.unneeded.append(key)
                for record in report.rollouts:
                    self._release_rows(record.routes)
        self._seal_what_can_be()
        self.admission_changed.notify()
        self.mirror_due.set()
        return result

    def reported_lately(self, key: AttemptKey) -> bool:
        """Whether a report of this attempt came: a heartbeat that still lists it crossed it on the way."""
        return key in self._reported

    def _remember(self, key: AttemptKey) -> None:
        self._reported[key] = None
        if len(self._reported) > _REPORTS_REMEMBERED:
            self._reported.popitem(last=False)

    def _taken_before(self, key: AttemptKey) -> bool:
        position = position_of(key[0])
        group = None if position is None else self.machine.group(position)
        if group is not None and group.attempt == key[1] and group.phase in (Phase.SCORED, Phase.SEALED):
            return True
        # Rows of trained steps may be asked for again until a checkpoint covers them.
        return any(key in plan.attempts for step, plan in self.plans.items() if step > self.released_step)

    def _acknowledge_everywhere(self, key: AttemptKey) -> None:
        # The report of a cancelled attempt says as well that the engines are done with it.
        for runner in self.leases.runners:
            if key in runner.cancellations:
                self.leases.acknowledge(runner, [key])

    def _take(self, running: Attempt, report: runner_pb2.GroupReport) -> bool:
        """Act on a report; return whether its rows are still needed."""
        assignment = running.assignment
        finished = report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
        if assignment.purpose == EVALUATION:
            self._take_evaluation(assignment, report, finished=finished)
            return False
        if assignment.purpose == EXTERNAL:
            self._take_external(assignment, report, finished=finished)
            return False
        position, attempt = assignment.position, assignment.attempt
        self._interval.add_given_up(report)
        self.sessions.reported(position, attempt, [record.sample_index for record in report.rollouts])
        if report.outcome == runner_pb2.GROUP_OUTCOME_CANCELLED:
            # Not by us: ours are no longer in the list. A runner that drains hands its groups back.
            self._lose(position, attempt)
            return False
        if report.reason in OUTAGES:
            self._lose(position, attempt, counted=False)
            return False
        few = len(report.rollouts) < self.config.min_group_size and not has_advantages(report.rollouts)
        if not finished or few:
            self._interval.groups_failed += 1
            if finished:
                detail = "too few of its rollouts finished"
                self.failures.useless(assignment, running.runner_id, TOO_FEW_MEMBERS, detail)
            self._end(position, attempt, Outcome.FAILED, report.reason or TOO_FEW_MEMBERS)
            return False
        self._interval.add(assignment.environment, report.rollouts)
        try:
            scored = self.sealer.judge(assignment, report.rollouts)
        except BadAdvantages as error:
            self._interval.groups_failed += 1
            self.failures.useless(assignment, running.runner_id, BAD_ADVANTAGES, str(error))
            self._end(position, attempt, Outcome.FAILED, BAD_ADVANTAGES)
            return False
        success = self.curriculum.took(assignment, report.rollouts)
        if scored is None:
            self._interval.groups_filtered += 1
            self.totals.groups_filtered += 1
            self.state.progress(self.state.phase_fraction, groups_filtered_since_step=self._interval.groups_filtered)
            self._end(position, attempt, Outcome.FILTERED, "NO_VARIANCE", success)
            return False
        self.machine.scored(position, attempt)
        self._scored[position] = scored
        self._journal.append("reported", position=position, attempt=attempt, rollouts=len(scored.records), **success)
        return True

    def _end(
        self, position: int, attempt: int, outcome: Outcome, reason: str, figures: Mapping[str, Any] | None = None
    ) -> None:
        if outcome is Outcome.FILTERED:
            self.machine.filtered(position, attempt)
        else:
            self.machine.failed(position, attempt)
        self.sessions.group_ended(position, attempt, reason)
        telemetry.groups_ended.labels(outcome.value, reason).inc()
        self._journal.append(
            "ended", position=position, attempt=attempt, outcome=outcome.value, reason=reason, **(figures or {})
        )

    def _lose(self, position: int, attempt: int, *, counted: bool = True) -> None:
        group = self.machine.group(position)
        self.sessions.group_ended(position, attempt, "RUNNER_LOST")
        if self.machine.lost(position, attempt, counted=counted):
            kind = "ended" if group is not None and group.outcome is not None else "lost"
            self._journal.append(kind, position=position, attempt=attempt, outcome="failed", counted=counted)

    def _take_evaluation(
        self, assignment: runner_pb2.GroupAssignment, report: runner_pb2.GroupReport, *, finished: bool
    ) -> None:
        if self.evaluation is None or assignment.group_id not in self.evaluation.tasks:
            return
        self.progress_at = self._clock()
        if finished and report.rollouts:
            self.evaluation.answer(assignment.group_id, report.rollouts)
        else:
            blameless = report.outcome == runner_pb2.GROUP_OUTCOME_CANCELLED or report.reason in OUTAGES
            self.evaluation.failed(assignment.group_id, blameless=blameless)

    def _take_external(
        self, assignment: runner_pb2.GroupAssignment, report: runner_pb2.GroupReport, *, finished: bool
    ) -> None:
        if report.outcome == runner_pb2.GROUP_OUTCOME_CANCELLED:
            # Not by us: a runner that drains hands its groups back.
            self.external.again(assignment.group_id, "RUNNER_LOST", "its runners stopped")
        elif report.reason in OUTAGES:
            self.external.again(assignment.group_id, report.reason, report.detail)
        elif finished:
            released = runner_pb2.GroupReport()
            released.CopyFrom(report)  # the caller still needs the references, to release them
            self.external.end(assignment.group_id, rollout_pb2.ROLLOUT_STATE_FINISHED, report=released)
        else:
            self.external.end(assignment.group_id, rollout_pb2.ROLLOUT_STATE_FAILED, report.reason, report.detail)

    def _note_outcome(self, running: Attempt, report: runner_pb2.GroupReport) -> None:
        assignment = running.assignment
        if assignment.purpose == EXTERNAL or assignment.HasField("session_group"):
            return  # what a third party asks for must not end the run
        counted = self.evaluation is not None and assignment.group_id in self.evaluation.failed_once
        if report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED:
            self.failures.finished(assignment.environment, counted=counted)
        elif report.outcome == runner_pb2.GROUP_OUTCOME_FAILED:
            self.concurrency.failed(report.reason)
            self.failures.failed(assignment, report, running.runner_id, counted=counted)
            if self.evaluation is not None and assignment.purpose == EVALUATION:
                self.evaluation.failed_once.add(assignment.group_id)

    # ---- giving up

    def lose(self, keys: Iterable[AttemptKey]) -> None:
        """Give up attempts whose runner is gone; each gets another one."""
        for key in keys:
            attempt = self._running.pop(key)
            if attempt is None:
                continue
            assignment = attempt.assignment
            if assignment.purpose == EVALUATION and self.evaluation and assignment.group_id in self.evaluation.tasks:
                self.evaluation.failed(assignment.group_id, blameless=True)
            elif assignment.purpose == EXTERNAL:
                self.external.again(assignment.group_id, "RUNNER_LOST", "its runners were lost")
            elif assignment.purpose == TRAINING:
                self._lose(assignment.position, assignment.attempt)
        self.admission_changed.notify()
        self.mirror_due.set()

    def expire(self) -> None:
        """Give up what dead runners had, and what is long past its deadline."""
        for runner, lost in self.leases.expire():
            log.warning("runner_lost", runner_id=runner.runner_id, group_count=len(lost))
            self.lose(lost)
        now = self._clock()
        overdue = [
            attempt
            for attempt in self._running
            if now - attempt.started_at > attempt.assignment.deadline_ms / 1000 + _DEADLINE_GRACE_S
        ]
        for attempt in overdue:
            self.leases.cancel(attempt.runner_id, attempt.key, "DEADLINE")
        if overdue:
            log.warning("groups_overdue", group_count=len(overdue))
            self.lose([attempt.key for attempt in overdue])

    def cancel_external(self, group_id: str) -> None:
        """Cancel a third party's group, running or not."""
        self.external.get(group_id)
        self._stop([a for a in self._running if a.assignment.group_id == group_id], "CLIENT")
        self.external.end(group_id, rollout_pb2.ROLLOUT_STATE_CANCELLED, "CLIENT", "cancelled by CancelRollout")

    def stop_evaluation(self) -> None:
        """End the evaluation; what still runs of it is cancelled."""
        tasks = self.evaluation.tasks if self.evaluation is not None else {}
        self._stop([a for a in self._running if a.assignment.group_id in tasks], "EVALUATION_ENDED")
        self.evaluation = None
        self.admission_changed.notify()

    def stop_all(self, reason: str) -> None:
        """Cancel everything that runs: the run is over."""
        self._stop(list(self._running), reason)
        self.external.end_all(reason)
        self.sessions.end_all(reason)
        state = run_pb2.RunState.Name(self.state.state).removeprefix("RUN_STATE_").lower()
        self._journal.append("run_ended", state=state, reason=self.state.reason)
        for group in [*self.machine, *self.machine.parked]:
            if self.machine.cancel(group.position, reason) is not None:
                self._journal.append("ended", position=group.position, attempt=group.attempt, outcome="cancelled")
        self._scored.clear()
        self.admission_changed.notify()
        self.sealed.notify()

    def _stop(self, attempts: Sequence[Attempt], reason: str) -> None:
        for attempt in attempts:
            self._running.pop(attempt.key)
            self.leases.cancel(attempt.runner_id, attempt.key, reason)
            self.traces.ended(attempt.assignment, attempt.started_at, reason.lower())
        self.mirror_due.set()

    def _give_up(self, cancellations: Sequence[Cancellation]) -> None:
        counts: Counter[tuple[str, str]] = Counter()
        rollout_counts: Counter[tuple[str, str]] = Counter()
        for given_up in cancellations:
            key = (group_id_of(given_up.position), given_up.attempt)
            members = self.sessions.of_attempt(given_up.position, given_up.attempt)
            attempt = self._running.pop(key)
            if attempt is not None:
                self.leases.cancel(attempt.runner_id, key, given_up.reason.upper())
                self.traces.ended(attempt.assignment, attempt.started_at, given_up.reason)
                surplus = self.config.over_sampling > 1.0  # meant to be given up
                measured = members is None and not surplus and not attempt.taken_up
                if given_up.reason == "aged_out" and measured:
                    self.durations.cut_off(given_up.environment, self._clock() - attempt.started_at)
            scored = self._scored.pop(given_up.position, None)
            if scored is not None:
                self._release_rows(ref for record in scored.records for ref in record_rows(record))
            self.sessions.group_ended(given_up.position, given_up.attempt, given_up.reason.upper())
            name = (given_up.reason, given_up.environment if members is None else SESSION)
            counts[name] += 1
            rollout_counts[name] += self.config.samples_per_group if members is None else members.size
            outcome = "dropped" if given_up.reason == "run_complete" else "aged_out"
            kind = "regenerated" if given_up.regenerated else "ended"
            if given_up.regenerated:
                telemetry.groups_regenerated.inc()
            else:
                telemetry.groups_ended.labels(outcome, given_up.reason.upper()).inc()
            self._journal.append(kind, position=given_up.position, attempt=given_up.attempt, outcome=outcome)
        for (reason, environment), count in counts.items():
            rollouts = rollout_counts[reason, environment]
            self.totals.cancelled[reason] += rollouts
            telemetry.groups_cancelled.labels(environment, reason.upper()).inc(count)
            self._metrics.write("cancelled", reason=reason, environment=environment, count=rollouts, groups=count)
            log.info("groups_cancelled", reason=reason, environment=environment, group_count=count)

    # ---- steps

    def serving_advanced(self, version: PolicyVersion) -> None:
        """Dispatch at this version from now on."""
        if version <= self.state.serving:
            return
        if version.step >= self.machine.serving_step:
            self.machine.serving_advanced(version.step)
        elif version.incarnation > self._served_before.incarnation:
            self.machine.served_again(version.step)
        else:
            return  # the engines have yet to come to what was served before
        self.state.serving = version
        self._journal.append("serving", version=str(version))
        self.mirror_due.set()
        self.state.changed.notify()
        self._seal_what_can_be()
        self.admission_changed.notify()

    def room_made(self) -> None:
        """Go on after a full disk."""
        self._seal_what_can_be()
        self.admission_changed.notify()

    def frontier(self) -> int:
        """Return the lowest position that has not ended, or whose plan is kept for a trainer that is restored."""
        kept = [position_of(name) or 0 for plan in self.plans.values() for name, _ in plan.attempts]
        return min((self.machine.frontier, *kept))

    def admission_may_have_opened(self) -> None:
        """Wake those who wait for groups: the phase or a pause changed."""
        self.admission_changed.notify()

    @property
    def ready_groups(self) -> int:
        """Groups that are ready for the next step."""
        return self.machine.count(Phase.SCORED)

    def _waiting_figures(self) -> dict[str, float]:
        if self.state.phase is not RunPhase.TRAINING or self.machine.sealed_step >= self.machine.last_step:
            return {}
        return {"groups_ready": float(self.ready_groups), "groups_per_step": float(self.config.groups_per_step)}

    @property
    def waits_for_agents(self) -> bool:
        """Whether sessions alone train and too few of them have come for a step."""
        machine = self.machine
        idle = machine.sealed_step == machine.trained_step and self.ready_groups < self.config.groups_per_step
        return self.config.sessions.only and self.state.phase is RunPhase.TRAINING and idle

    def trained(
        self, version: PolicyVersion, trainer_metrics: dict[str, float], step_s: float, *, skipped: bool = False
    ) -> list[Group]:
        """Record that the trainer made `version`; a repeat has no further effect.

        `skipped`: with the weights of the version before, as its loss or gradient was not finite, or nothing it
        was to train on is known.
        """
        if version.step == 0:
            self.state.progress(self.state.phase_fraction, **trainer_metrics)
            return []
        if version.incarnation > self.incarnation:
            self._catch_up(version.step - 1)
        groups = self.machine.trained(version.step, skipped=skipped)
        if not groups:
            self._note_retrained(version, trainer_metrics)
            return []
        self.lineage_step = version.step
        self.progress_at = self._clock()
        why = NOTHING_KNOWN if trainer_metrics.get("nothing_known") else NOT_FINITE
        outcome, reason = (Outcome.SKIPPED, why) if skipped else (Outcome.TRAINED, "")
        plan = self.plans[version.step]
        if not skipped:
            self._count_trained(plan)
        totals = self.totals.to_record()
        for group in groups:
            if skipped:
                self.sessions.group_ended(group.position, group.attempt, reason)
            else:
                self.sessions.trained(group.position, group.attempt, version.step)
        self._journal.append(outcome.value, step=version.step, incarnation=version.incarnation, totals=totals)
        telemetry.groups_ended.labels(outcome.value, reason).inc(len(groups))
        self.traces.trained(plan, version)
        self.skipped.note(plan, skipped=skipped, reason=why)
        self.durations.trained()
        self._let_go()
        self._write_step(plan, trainer_metrics, step_s, skipped=skipped)
        self._seal_what_can_be()
        self.admission_changed.notify()
        return groups

    def _count_trained(self, plan: SealedPlan) -> None:
        by_environment: Any = plan.figures["groups_by_environment"]
        for name, count in by_environment.items():
            self.totals.trained[name] += count
            telemetry.groups_trained.labels(name).inc(count)

    def restored(self, incarnation: int, step: int) -> None:
        """A trainer that was restored at `step` takes over: the sealed steps after it are trained once more."""
        self._catch_up(step)
        log.info("trainer_restored", incarnation=incarnation, step=step)
        self.incarnation, self.lineage_step = incarnation, step
        self._journal.append("restored", incarnation=incarnation, step=step)
        self._metrics.write("restored", incarnation=incarnation, step=step)

    def _catch_up(self, step: int) -> None:
        """Steps up to this one were taken, since there is a checkpoint of it, though the reports of some died with
        their trainer, and the figures with them.
        """
        while self.lineage_step < step:
            version = PolicyVersion(self.incarnation, self.lineage_step + 1)
            log.warning("step_report_lost", version=str(version))
            self.trained(version, {}, 0.0)

    def checkpointed(self, step: int | None) -> None:
        """The trainer writes checkpoints, the newest of `step`: what later steps need is kept. None: it writes none."""
        if step is None or self._checkpoint_step is None or step > self._checkpoint_step:
            self._checkpoint_step = step
            if step is not None:
                self._journal.append("checkpoint", step=step)
            self._let_go()

    @property
    def checkpoint_due(self) -> bool:
        """Whether a runner takes no groups while rows of trained steps wait for a checkpoint."""
        kept = self._checkpoint_step is not None and self.released_step < self.machine.trained_step
        return kept and any(runner.spool_full for runner in self.leases.runners)

    def _let_go(self) -> None:
        """Release the rows, and forget the plans, that no trainer will ask for again."""
        covered = self.machine.trained_step
        if self._checkpoint_step is not None:
            covered = min(covered, self._checkpoint_step)
        for step in range(self.released_step + 1, covered + 1):
            self._release_rows(self.plans[step].rows)
        self.released_step = max(self.released_step, covered)
        for step in [step for step in self.plans if step < self.released_step - KEPT_STEPS]:
            del self.plans[step]

    def _note_retrained(self, version: PolicyVersion, trainer_metrics: dict[str, float]) -> None:
        """Write down that a restored trainer took a step once more."""
        if version.incarnation == self.incarnation and version.step == self.lineage_step + 1:
            self.lineage_step = version.step
            self._journal.append("retrained", step=version.step, incarnation=version.incarnation)
            self.progress_at = self._clock()
            self._metrics.write("retrained", step=version.step, incarnation=version.incarnation, **trainer_metrics)

    @property
    def filtered_since_step(self) -> int:
        """Groups that were filtered for want of variance since a step was trained."""
        return self._interval.groups_filtered

    def _write_step(self, plan: SealedPlan, trainer_metrics: dict[str, float], step_s: float, *, skipped: bool) -> None:
        now = self._clock()
        figures: dict[str, object] = {
            **trainer_metrics,
            **plan.figures,
            **({"groups_skipped": plan.figures["groups_trained"], "groups_trained": 0} if skipped else {}),
            **self._interval.fields(now),
            **(
                {}
                if self._interval.rewards
                else {**reward_fields(plan.rewards), **role_reward_fields(plan.role_rewards)}
            ),
            "step_s": trainer_metrics.get("step_s", step_s),
            "open_groups": self.machine.open_groups,
            **self.group_figures.fields(self.machine, self.machine.sealed_step + 1),
            **self.curriculum.fields(),
            **self.totals.fields(),
        }
        self.curriculum.forget_all_but(group.position for group in [*self.machine, *self.machine.parked])
        interval, self._interval = self._interval, StepInterval(now)
        self._metrics.write("step", step=plan.step, **figures)
        self.state.step = plan.step
        # Where no rollout ended since the last step, the figures of it still stand.
        shown = {k: v for k, v in finite(figures).items() if k != "tokens_per_s" or interval.sampled_tokens}
        self.state.progress(
            plan.step / self.machine.last_step,
            **{key: float(value) for key, value in shown.items() if isinstance(value, int | float)},
            groups_filtered_since_step=0,
        )

    def want(self, step: int) -> None:
        """The trainer asks for the plan of `step`: it may be sealed.

        No step is sealed before. Sealing ahead would fix batches of whatever ends first, and with every step sealed the
        groups that still run come a version closer to ageing out, though no trainer waits for their place.
        """
        if step > self._wanted_step:
            self._wanted_step = step
            self._seal_what_can_be()

    def _seal_what_can_be(self) -> None:
        while self.machine.sealed_step < self._wanted_step and DISK not in self.state.pauses:
            sealed = self.machine.seal()
            if sealed is None:
                return
            self._seal(sealed)

    def _seal(self, sealed: SealedStep) -> None:
        groups = [self._scored.pop(group.position) for group in sealed.groups]
        plan = self.sealer.plan(sealed, groups, self.incarnation, self._masked)
        self.plans[sealed.step] = plan
        self.traces.sealed(plan)
        telemetry.steps_sealed.inc()
        telemetry.trained_tokens.inc(sum(rank_plan.loss_token_count for rank_plan in plan.plans[:1]))
        for group in sealed.groups:
            telemetry.lag.observe(group.lag(sealed.step))
        self._journal.append(
            "sealed",
            step=sealed.step,
            positions=[group.position for group in sealed.groups],
            attempts=[group.attempt for group in sealed.groups],
            dispatch_steps=[group.dispatch_step for group in sealed.groups],
            plans=[packed(rank_plan) for rank_plan in plan.plans],
            figures=plan.figures,
        )
        self._give_up(sealed.cancellations)
        self.sealed.notify()


def task_sequence(config: OrchestratorConfig) -> TaskSequence:
    """Return the task sequence of a config."""
    return TaskSequence(config.seed, [MixtureEntry(e.name, e.weight, e.train_task_count) for e in config.environments])
