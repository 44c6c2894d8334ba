"""Takes the run from phase to phase, and ends it with one sentence when it cannot go on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import structlog

from slipstream.api.run.v1 import run_pb2
from slipstream.orchestrator.config import OrchestratorConfig
from slipstream.orchestrator.evaluation import Evaluation, fields_of
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.keeper import VersionKeeper
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.replay import History
from slipstream.orchestrator.run_state import RunPhase, RunState
from slipstream.orchestrator.sequencer import Sequencer

log = structlog.get_logger()

_SAVE_TIMEOUT_S = 60.0
"""How long the run waits for a trainer that writes the final weights."""


class Supervisor:
    """Drives the phases (`run`) and watches for a run that cannot go on (`watch`)."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        state: RunState,
        sequencer: Sequencer,
        keeper: VersionKeeper,
        metrics: MetricsFile,
        journal: Journal,
        history: History | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`history`: what earlier processes of this run have done."""
        self._journal = journal
        self._taken_up = history is not None
        self._done = set(history.accuracies) if history else set[str]()
        """Evaluations that need not be asked."""
        self._begun = history.evaluation_starts if history else Counter[str]()
        self._config = config
        self._state = state
        self._sequencer = sequencer
        self._keeper = keeper
        self._metrics = metrics
        self._clock = clock
        self._started_at = clock()
        self._empty_since: dict[str, float] = {}

    async def run(self) -> None:
        """Run all phases, then stay: the process ends when it is told to."""
        await self._until(lambda: bool(self._state.serving))
        if self._config.evaluate_only:
            await self._evaluate("eval", RunPhase.EVALUATING_BEFORE)
            self.end(run_pb2.RUN_STATE_FINISHED, "the held-out problems are asked")
            await asyncio.Event().wait()
        if self._config.evaluate_before and "before" not in self._done:
            await self._evaluate("before", RunPhase.EVALUATING_BEFORE)
        self._enter(RunPhase.TRAINING)
        self._state.progress(self._state.step / self._sequencer.machine.last_step)  # above 0 where it goes on
        await self._evaluate_now_and_then()
        # The last version must be served before it can be judged.
        machine = self._sequencer.machine
        await self._until(lambda: machine.complete and self._state.serving.step >= machine.last_step)
        await self._until(lambda: machine.trained_step >= machine.last_step)
        if self._config.evaluate_after and "after" not in self._done:
            await self._evaluate("after", RunPhase.EVALUATING_AFTER)
        await self._until_saved()
        self.end(run_pb2.RUN_STATE_FINISHED, f"all {machine.last_step} steps are trained")
        await asyncio.Event().wait()

    async def watch(self) -> None:
        """Expire leases and look for reasons to end the run, for ever."""
        while True:
            await asyncio.sleep(0.5)
            self._sequencer.expire()
            self._sequencer.look_at_load(self._keeper.routable("decode"))
            if self._sequencer.breakers.open:  # a probe may be due
                self._sequencer.admission_may_have_opened()
            reason = None if self._state.ended else self.hopeless()
            if reason:
                self.end(run_pb2.RUN_STATE_FAILED, reason)

    def end(self, state: run_pb2.RunState, reason: str) -> None:
        """End the run and cancel what is left."""
        if self._state.end(state, reason):
            name = run_pb2.RunState.Name(state).removeprefix("RUN_STATE_")
            self._metrics.write("totals", **self._sequencer.totals.fields())
            self._sequencer.stop_all("RUN_COMPLETE" if name == "FINISHED" else f"RUN_{name}")

    def hopeless(self) -> str | None:
        """Return one sentence on why the run cannot go on, or None."""
        config, now = self._config, self._clock()
        if self._state.closed or not self._state.serving:  # a new process waits for the engines, too
            self._sequencer.failures.pardon(now)
        for name, streak in self._sequencer.failures.streaks.items():
            if streak.count > 1 and now - streak.since > config.failing_environment_timeout_s:
                return streak.sentence(name)
        if self._sequencer.skipped.sentence:
            return self._sequencer.skipped.sentence
        if not self._state.serving:
            if self._state.closed:
                self._started_at = now
            if now - self._started_at > config.start_timeout_s:
                published = str(self._state.published) if self._state.published else "no version"
                return f"no version was served after {config.start_timeout_s:.0f} s; published: {published}"
            self._sequencer.progress_at = now
            return None
        for role in self._keeper.roles:
            if self._lasts(role, not self._keeper.routable(role)) > config.pool_timeout_s:
                stale = [w for w in self._keeper.workers if w.role == role and w.stale_reason]
                why = "".join(f"; {worker.replica} is stale: {worker.stale_reason}" for worker in stale[:1])
                return f"the {role} pool had no routable worker for {config.pool_timeout_s:.0f} s{why}"
        if self._lasts("runner", not self._sequencer.leases.runners) > config.pool_timeout_s:
            return f"no runner reported for {config.pool_timeout_s:.0f} s"
        # Of an agent that takes its time: its session has a timeout of its own. Where sessions alone train, the next
        # agent may come at any time.
        if self._state.pauses or self._sequencer.sessions.open_count or self._sequencer.waits_for_agents:
            self._sequencer.progress_at = now
        if now - self._sequencer.progress_at > config.longest_stall_s:
            return f"nothing was trained or answered for {config.longest_stall_s:.0f} s in {self._stalled_in()}"
        return None

    def _stalled_in(self) -> str:
        """The phase, and what else is known of why it does not go on."""
        phase, filtered = f"phase {self._state.phase.value}", self._sequencer.filtered_since_step
        if not filtered:
            return phase
        return (
            f"{phase}, as {filtered:,} groups were filtered in which all rollouts earned the same reward; "
            "what they answered: slipstream rollouts"
        )

    def _lasts(self, what: str, present: bool) -> float:
        if not present:
            self._empty_since.pop(what, None)
            return 0.0
        now = self._clock()
        return now - self._empty_since.setdefault(what, now)

    async def _evaluate_now_and_then(self) -> None:
        """Ask the held-out tasks every so many steps, up to the last but one; training goes on meanwhile.

        So an answer may cross an update; its step is that of the weights it was asked at first. Steps that pass during
        an evaluation are not made up for.
        """
        every, machine = self._config.evaluate_every_steps, self._sequencer.machine
        while every:
            due = (self._state.serving.step // every + 1) * every
            await self._until(lambda due=due: self._state.serving.step >= min(due, machine.last_step))
            if self._state.serving.step >= machine.last_step:
                return
            await self._evaluate(f"step-{self._state.serving.step}", None)

    async def _evaluate(self, name: str, phase: RunPhase | None) -> None:
        """One evaluation, as a phase of its own, or within the one at hand."""
        counts = {e.name: e.evaluation_task_count for e in self._config.environments if e.evaluation_task_count}
        self._journal.append("evaluating", name=name)
        evaluation = Evaluation(name, counts, self._state.serving.step, self._config.evaluation, self._begun[name])
        self._begun[name] += 1
        evaluation.allowed = self._sequencer.breakers.allows
        self._sequencer.evaluation = evaluation
        if phase is None:
            self._sequencer.admission_may_have_opened()
        else:
            self._enter(phase)
        await self._until_answered(evaluation, phase)
        self._sequencer.stop_evaluation()
        if self._state.ended:
            return
        results = [(result.environment, result.accuracy, result.problem_count) for result in evaluation.results()]
        self._journal.append("evaluated", name=name, step=evaluation.step, results=results)
        for result in evaluation.results():
            self._state.accuracies.append(result)
            self._metrics.write("evaluation", **fields_of(result))
            log.info("evaluated", name=name, environment=result.environment, accuracy=result.accuracy)
        self._state.changed.notify()

    async def _until_answered(self, evaluation: Evaluation, phase: RunPhase | None) -> None:
        """Wait for all answers, the end of the run, or the evaluation's time, of which pauses are no part."""
        timeout_s = self._config.evaluation.timeout_s
        deadline = self._clock() + timeout_s
        looked = self._clock()
        while not evaluation.done and not self._state.ended:
            await evaluation.changed.wait(1.0)
            if phase is not None:
                self._state.progress(evaluation.fraction_done)
            now = self._clock()
            if self._state.pauses:
                deadline += now - looked
            looked = now
            if now >= deadline:
                asked = len(evaluation.tasks)
                log.warning("evaluation_cut_off", name=evaluation.name, answered=evaluation.answered, asked=asked)
                return

    def _enter(self, phase: RunPhase) -> None:
        self._sequencer.progress_at = self._clock()
        self._state.enter(phase)
        self._sequencer.admission_may_have_opened()

    async def _until_saved(self) -> None:
        """Wait for the final weights, since the end of the run ends the trainer, too: for a while, or a pause.

        What the trainer does at that is not known from an earlier process of this run: it says so again.
        """
        state = self._state
        deadline = self._clock() + _SAVE_TIMEOUT_S
        saved = ("ended",) if self._taken_up else ("", "ended")
        while state.trainer_activity not in saved and not state.ended and self._clock() < deadline:
            await state.changed.wait(1.0)
            if state.pauses:
                deadline = self._clock() + _SAVE_TIMEOUT_S

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached() or self._state.ended:
            await self._state.changed.wait(1.0)
