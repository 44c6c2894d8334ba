"""Asking held-out tasks, greedy, one sample each, through the same runners and engines as training."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from slipstream.orchestrator.run_state import AccuracyResult
from slipstream.orchestrator.signals import Signal
from slipstream.orchestrator.tasks import Task, evaluation_tasks

MAX_ATTEMPTS = 3


class Evaluation:
    """One evaluation: hands its tasks out, counts the answers. A task that fails three times counts as wrong."""

    def __init__(self, name: str, counts: Mapping[str, int], step: int) -> None:
        self.name = name
        self.step = step
        self.changed = Signal()
        self.tasks: dict[str, Task] = {
            f"{name}-{environment}-{task.index}": task
            for environment, count in counts.items()
            for task in evaluation_tasks(environment, count)
        }
        self._waiting: deque[str] = deque(self.tasks)
        self._attempts: dict[str, int] = {}
        self.failed_once: set[str] = set()
        self._answers: dict[str, bool] = {}

    @property
    def waiting(self) -> bool:
        """Whether `take` would return a task."""
        return bool(self._waiting)

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

    def take(self) -> tuple[str, int, Task]:
        """Return the next task: group id, attempt, task."""
        group_id = self._waiting.popleft()
        attempt = self._attempts[group_id] = self._attempts.get(group_id, 0) + 1
        return group_id, attempt, self.tasks[group_id]

    def answer(self, group_id: str, correct: bool) -> None:
        """Record an answer."""
        self._answers.setdefault(group_id, correct)
        self.changed.notify()

    def failed(self, group_id: str, *, blameless: bool = False) -> None:
        """Ask again, or count the task as wrong. A runner that died is not the task's fault."""
        if not blameless and self._attempts[group_id] >= MAX_ATTEMPTS:
            self.answer(group_id, False)
        else:
            self._waiting.append(group_id)
        self.changed.notify()

    def results(self) -> list[AccuracyResult]:
        """Return the accuracy of each environment."""
        totals: dict[str, list[bool]] = {}
        for group_id, task in self.tasks.items():
            totals.setdefault(task.environment, []).append(self._answers.get(group_id, False))
        return [
            AccuracyResult(self.name, environment, sum(answers) / len(answers), len(answers), self.step)
            for environment, answers in totals.items()
        ]
