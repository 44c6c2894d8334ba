"""Asking held-out tasks through the same runners and engines as training, one group of samples each.

While training goes on an evaluation takes a share of the slots, and no more: `take` is for whoever asked
`may_take` first. Its rollouts are counted, and never trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import structlog

from slipstream.algorithms.evaluation import Answer, Summary, summarize
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.orchestrator.run_state import AccuracyResult
from slipstream.orchestrator.signals import Signal
from slipstream.orchestrator.tasks import Task, evaluation_tasks

log = structlog.get_logger()

MAX_ATTEMPTS = 3
WRONG = Answer(correct=False, reward=0.0, token_count=0, truncated=False)
ATTEMPTS_OF_A_START = 10_000
"""Numbers of attempts that each beginning of an evaluation has for itself: no two share a name."""


class Evaluation:
    """One evaluation: hands its tasks out, counts the answers. A task that fails three times counts as wrong."""

    def __init__(
        self,
        name: str,
        counts: Mapping[str, int],
        step: int,
        config: EvaluationConfig | None = None,
        begun_before: int = 0,
    ) -> None:
        """`begun_before`: how often it was begun and not ended, by processes that died."""
        self.name = name
        self.step = step
        self.config = config or EvaluationConfig()
        self.changed = Signal()
        self.allowed: Callable[[str], bool] = lambda environment: True
        """Whether an environment may be asked now; one that is backed off may not."""
        self.tasks: dict[str, Task] = {
            f"{name}-{environment}-{task.index}": task
            for environment, count in counts.items()
            for task in evaluation_tasks(environment, count)
        }
        self._waiting: deque[str] = deque(self.tasks)
        self._running: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._attempts_before = begun_before * ATTEMPTS_OF_A_START
        self.failed_once: set[str] = set()
        self._answers: dict[str, list[Answer]] = {}
        self._versions: dict[str, tuple[PolicyVersion, PolicyVersion]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a task waits to be asked, of an environment that is allowed."""
        return self._next() is not None

    def _next(self) -> str | None:
        return next((name for name in self._waiting if self.allowed(self.tasks[name].environment)), None)

    @property
    def running(self) -> int:
        """Groups that are asked at the moment."""
        return len(self._running)

    @property
    def answered(self) -> int:
        """Tasks that are done."""
        return len(self._answers)

    @property
    def done(self) -> bool:
        """Whether every task is done."""
        return len(self._answers) == len(self.tasks)

    @property
    def fraction_done(self) -> float:
        """Part of the tasks that are done."""
        return len(self._answers) / max(len(self.tasks), 1)

    def may_take(self, slot_count: int, samples_per_slot: int) -> bool:
        """Whether a task waits, and the share of so many slots has room for it; one task runs in any case."""
        if not self.waiting:
            return False
        allowed = self.config.share * slot_count
        next_running = len(self._running) + 1
        samples = next_running * self.config.samples
        return next_running == 1 or (next_running <= allowed and samples <= allowed * samples_per_slot)

    def take(self) -> tuple[str, int, Task]:
        """Return the next task: group id, attempt, task."""
        group_id = self._next()
        assert group_id is not None, "whoever takes has asked"
        self._waiting.remove(group_id)
        self._running.add(group_id)
        attempt = self._attempts[group_id] = self._attempts.get(group_id, 0) + 1
        return group_id, self._attempts_before + attempt, self.tasks[group_id]

    def answer(self, group_id: str, records: Sequence[runner_pb2.RolloutRecord]) -> None:
        """Record the samples of a task."""
        self._running.discard(group_id)
        if group_id not in self._answers:
            self._answers[group_id] = [answer_of(record) for record in records]
            self._see(self.tasks[group_id].environment, records)
        self.changed.notify()

    def failed(self, group_id: str, *, blameless: bool = False) -> None:
        """Ask again, or count the task as wrong. A runner that died is not the task's fault."""
        self._running.discard(group_id)
        if group_id in self._answers or group_id in self._waiting:
            return
        if not blameless and self._attempts[group_id] >= MAX_ATTEMPTS:
            self._answers[group_id] = [WRONG] * self.config.samples
        else:
            self._waiting.append(group_id)
        self.changed.notify()

    def results(self) -> list[AccuracyResult]:
        """Return what is known of each environment that answered anything."""
        results: list[AccuracyResult] = []
        for environment in dict.fromkeys(task.environment for task in self.tasks.values()):
            asked = [group_id for group_id, task in self.tasks.items() if task.environment == environment]
            answers = [self._answers[group_id] for group_id in asked if group_id in self._answers]
            if not answers:
                log.warning("evaluation_without_answers", name=self.name, environment=environment)
                continue
            summary = summarize(answers)
            oldest, newest = self._versions.get(environment, (UNSET, UNSET))
            results.append(
                AccuracyResult(
                    self.name,
                    environment,
                    summary.accuracy,
                    summary.problem_count,
                    self.step,
                    summary,
                    oldest=oldest,
                    newest=newest,
                    unanswered=len(asked) - len(answers),
                )
            )
        return results

    def _see(self, environment: str, records: Sequence[runner_pb2.RolloutRecord]) -> None:
        versions = [version for record in records for version in versions_of(record)]
        if versions:
            oldest, newest = self._versions.get(environment, (versions[0], versions[0]))
            self._versions[environment] = min(oldest, *versions), max(newest, *versions)


def answer_of(record: runner_pb2.RolloutRecord) -> Answer:
    """What counts of a rollout, all its samples together."""
    samples = [record, *record.further_samples]
    return Answer(
        correct=record.correct,
        reward=record.reward,
        token_count=sum(span.token_count for sample in samples for span in sample.spans),
        truncated=bool(record.cut) or samples[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH,
        roles={each.role: (each.reward, each.correct) for each in record.role_rewards},
    )


def versions_of(record: runner_pb2.RolloutRecord) -> list[PolicyVersion]:
    """Those that sampled any of its tokens."""
    return [
        PolicyVersion.from_proto(span.version) for sample in (record, *record.further_samples) for span in sample.spans
    ]


def fields_of(result: AccuracyResult) -> dict[str, object]:
    """A result as `metrics.jsonl` has it."""
    fields: dict[str, object] = {
        "name": result.evaluation,
        "step": result.step,
        "environment": result.environment,
        "accuracy": result.accuracy,
        "count": result.problem_count,
    }
    return fields if result.summary is None else {**fields, **_figures(result, result.summary)}


def _role_figures(summary: Summary) -> dict[str, object]:
    if not summary.roles:
        return {}
    return {
        "reward_by_role": {role: each.reward_mean for role, each in summary.roles.items()},
        "accuracy_by_role": {role: each.accuracy for role, each in summary.roles.items()},
    }


def _figures(result: AccuracyResult, summary: Summary) -> dict[str, object]:
    low, high = summary.accuracy_interval
    versions = {"version_min": str(result.oldest), "version_max": str(result.newest)} if result.newest else {}
    return {
        "unanswered": result.unanswered,
        "samples": summary.samples_per_problem,
        "accuracy_low": low,
        "accuracy_high": high,
        "reward_mean": summary.reward_mean,
        "pass_at_k": {str(k): value for k, value in summary.pass_at.items()},
        "tokens_mean": summary.tokens_mean,
        "truncated_fraction": summary.truncated_fraction,
        **_role_figures(summary),
        **versions,
    }
