"""Metrics of the orchestrator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from slipstream.algorithms.staleness import Phase
from slipstream.common.metrics import Reading
from slipstream.orchestrator.run_state import RunPhase

if TYPE_CHECKING:
    from slipstream.algorithms.evaluation import Summary
    from slipstream.orchestrator.journal import Journal
    from slipstream.orchestrator.leases import RunnerLeases
    from slipstream.orchestrator.run_state import AccuracyResult, RunState
    from slipstream.orchestrator.sequencer import Sequencer

_PHASES = (Phase.WAITING, Phase.PARKED, Phase.RUNNING, Phase.SCORED, Phase.SEALED)

groups = Reading("gauge", "slipstream_orchestrator_groups", "Open groups of training, by state.", ["state"])
slots_used = Reading("gauge", "slipstream_orchestrator_admission_slots_used", "Open groups.")
slots_limit = Reading("gauge", "slipstream_orchestrator_admission_slots_limit", "The most groups that may be open now.")
runners = Reading("gauge", "slipstream_orchestrator_runners", "Runners whose lease runs.")
run_phase = Reading("gauge", "slipstream_orchestrator_run_phase", "1 for the phase the run is in.", ["phase"])
paused = Reading("gauge", "slipstream_orchestrator_paused", "1 while admission is closed; the log says why.")
step = Reading("gauge", "slipstream_orchestrator_trained_step", "Last step trained.")
published_step = Reading("gauge", "slipstream_orchestrator_published_step", "Newest step published.")
serving_step = Reading("gauge", "slipstream_orchestrator_serving_step", "Step that groups are dispatched at.")
environment_open = Reading(
    "gauge",
    "slipstream_orchestrator_environment_backed_off",
    "1 while an environment is backed off, as it only fails or its sandbox is away.",
    ["environment"],
)
group_p90 = Reading(
    "gauge",
    "slipstream_orchestrator_group_p90_seconds",
    "90th percentile of how long groups take, at least, by environment.",
    ["environment"],
)
rollouts_in_flight = Reading("gauge", "slipstream_orchestrator_rollouts_in_flight", "Rollouts that runners have.")
rollouts_limit = Reading(
    "gauge", "slipstream_orchestrator_rollouts_limit", "The most rollouts in flight, as engines have room; 0: no limit."
)
rollouts_limit_lowered = Reading(
    "counter", "slipstream_orchestrator_rollouts_limit_lowered", "Times that limit fell, by reason.", ["why"]
)
warnings = Reading("gauge", "slipstream_orchestrator_warnings", "Warnings that `slipstream status` shows.")
journal_bytes = Reading("gauge", "slipstream_orchestrator_journal_bytes", "Bytes of the journal on disk.")

evaluation_step = Reading(
    "gauge", "slipstream_orchestrator_evaluation_step", "Step of the last evaluation.", ["environment"]
)
evaluation_accuracy = Reading(
    "gauge", "slipstream_orchestrator_evaluation_accuracy", "Accuracy in the last evaluation.", ["environment"]
)
evaluation_reward = Reading(
    "gauge", "slipstream_orchestrator_evaluation_reward", "Mean reward in the last evaluation.", ["environment"]
)
evaluation_pass_at_k = Reading(
    "gauge", "slipstream_orchestrator_evaluation_pass_at_k", "pass@k in the last evaluation.", ["environment", "k"]
)
evaluation_groups = Reading("gauge", "slipstream_orchestrator_evaluation_groups", "Held-out problems asked now.")

lags = Reading(
    "gauge",
    "slipstream_orchestrator_open_lag_versions",
    "The most versions that an open group is behind, in flight or in the queue.",
    ["environment", "where"],
)
oldest_group = Reading(
    "gauge",
    "slipstream_orchestrator_oldest_group_seconds",
    "Since the oldest open group was handed out first.",
    ["environment"],
)
groups_again = Reading(
    "counter",
    "slipstream_orchestrator_groups_dispatched_again",
    "Attempts that were not the first of their group.",
    ["environment"],
)

success_rate = Reading(
    "gauge",
    "slipstream_orchestrator_success_rate",
    "Part of the rollouts that were right, of late, where it chooses the tasks.",
    ["environment"],
)

groups_cancelled = Counter(
    "slipstream_orchestrator_groups_cancelled",
    "Attempts that were given up, by reason.",
    ["environment", "reason"],
)
groups_ended = Counter(
    "slipstream_orchestrator_groups_ended",
    "Groups of training that ended, by outcome (trained, skipped, filtered, failed, aged_out, dropped) and reason.",
    ["outcome", "reason"],
)
groups_trained = Counter(
    "slipstream_orchestrator_groups_trained",
    "Groups that were trained, by environment; those of sessions as environment `session`.",
    ["environment"],
)
external_ended = Counter(
    "slipstream_orchestrator_external_groups_ended",
    "Groups of third parties that ended, by environment (`prompt`: prompts of their own) and how they ended.",
    ["environment", "state"],
)
groups_regenerated = Counter("slipstream_orchestrator_groups_regenerated", "Groups started again as too old.")
outside_waiting = Reading(
    "gauge", "slipstream_orchestrator_outside_groups_waiting", "Groups from outside that wait for a runner.", ["kind"]
)
sessions_open = Reading("gauge", "slipstream_orchestrator_sessions_open", "Sessions that outside agents drive.")
sessions_opened = Counter("slipstream_orchestrator_sessions_opened", "Sessions opened.")
sessions_ended = Counter(
    "slipstream_orchestrator_sessions_ended",
    "Sessions that ended, by what became of them: TRAINED, IDLE_TIMEOUT, AGED_OUT ...",
    ["reason"],
)
steps_sealed = Counter("slipstream_orchestrator_steps_sealed", "Steps sealed.")
trained_tokens = Counter("slipstream_orchestrator_trained_tokens", "Tokens of sealed steps that the loss counts.")
lag = Histogram(
    "slipstream_orchestrator_lag_versions",
    "Versions that a group was behind when it was sealed.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 16),
)


def observe(state: RunState, sequencer: Sequencer, leases: RunnerLeases, journal: Journal) -> None:
    """Read this orchestrator from now on."""
    machine = sequencer.machine

    def by_state() -> dict[str, float]:
        phases = [group.phase for group in [*machine, *machine.parked]]
        return {phase.value: phases.count(phase) for phase in _PHASES}

    groups.read_from(by_state)
    figures = sequencer.group_figures
    lags.read_from(lambda: figures.lags(list(machine), machine.sealed_step + 1))
    oldest_group.read_from(lambda: figures.oldest_s(list(machine)))
    groups_again.read_from(lambda: figures.again)
    success_rate.read_from(sequencer.curriculum.mean_rates)
    slots_used.read_from(lambda: machine.open_groups)
    slots_limit.read_from(lambda: machine.admission_bound)
    outside_waiting.read_from(lambda: sequencer.line.counts)
    sessions_open.read_from(lambda: sequencer.sessions.open_count)
    runners.read_from(lambda: len(leases.runners))
    run_phase.read_from(lambda: {phase.value: state.phase is phase for phase in RunPhase})
    paused.read_from(lambda: bool(state.pauses))
    step.read_from(lambda: state.step)
    published_step.read_from(lambda: state.published.step)
    serving_step.read_from(lambda: state.serving.step)
    _observe_evaluations(state, sequencer)
    environment_open.read_from(lambda: {name: sequencer.breakers.is_open(name) for name in sequencer.environments})
    group_p90.read_from(sequencer.durations.percentiles)
    rollouts_in_flight.read_from(lambda: sequencer.rollouts_in_flight)
    rollouts_limit.read_from(lambda: sequencer.concurrency.rollouts or 0)
    rollouts_limit_lowered.read_from(lambda: dict(sequencer.concurrency.moves))
    warnings.read_from(lambda: len(state.warnings))
    journal_bytes.read_from(lambda: sum(file.stat().st_size for file in journal.path.parent.iterdir()))


def _observe_evaluations(state: RunState, sequencer: Sequencer) -> None:
    def newest() -> dict[str, AccuracyResult]:
        return {result.environment: result for result in list(state.accuracies)}

    def summaries() -> dict[str, Summary]:
        return {name: result.summary for name, result in newest().items() if result.summary is not None}

    evaluation_step.read_from(lambda: {name: result.step for name, result in newest().items()})
    evaluation_accuracy.read_from(lambda: {name: result.accuracy for name, result in newest().items()})
    evaluation_reward.read_from(lambda: {name: summary.reward_mean for name, summary in summaries().items()})
    evaluation_pass_at_k.read_from(
        lambda: {(name, str(k)): value for name, each in summaries().items() for k, value in each.pass_at.items()}
    )
    evaluation_groups.read_from(lambda: sequencer.evaluation.running if sequencer.evaluation else 0)
