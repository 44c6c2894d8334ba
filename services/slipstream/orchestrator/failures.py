"""Groups that failed, by environment: for the log, `metrics.jsonl`, and the decision that an environment only fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.orchestrator.metrics import MetricsFile

log = structlog.get_logger()

MAX_DETAIL_CHARS = 512
TOO_FEW_MEMBERS = "TOO_FEW_MEMBERS"
BAD_ADVANTAGES = "BAD_ADVANTAGES"


@dataclass(slots=True)
class FailureStreak:
    """Attempts at groups of one environment that failed since its last success."""

    count: int = 0
    since: float = 0.0
    detail: str = ""
    runner_id: str = ""
    groups: set[str] = field(default_factory=set)
    """Fewer than attempts: a problem of an evaluation is tried again. Bounded by what ends the run."""

    def sentence(self, environment: str) -> str:
        """What the run ends with."""
        attempts = f" ({self.count} attempts)" if self.count > len(self.groups) else ""
        groups = "1 group" if len(self.groups) == 1 else f"{len(self.groups)} groups"
        return (
            f"{groups} of environment {environment!r} failed in a row{attempts}, the last with: {self.detail}; "
            f"traceback in logs/{self.runner_id}.log"
        )


class Failures:
    """Counts groups that ended by environment, and those of them that failed."""

    def __init__(self, metrics: MetricsFile, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._ended: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self.streaks: dict[str, FailureStreak] = {}

    def finished(self, environment: str, *, counted: bool = False) -> None:
        """A group ended well; `counted`: it had failed before."""
        self._ended[environment] += not counted
        self.streaks.pop(environment, None)

    def useless(self, group: runner_pb2.GroupAssignment, runner_id: str, reason: str, detail: str) -> None:
        """A group that counts as finished turned out to be of no use."""
        self._failed[group.environment] += 1
        self._write(group, reason, detail[:MAX_DETAIL_CHARS], runner_id)

    def failed(
        self,
        group: runner_pb2.GroupAssignment,
        report: runner_pb2.GroupReport,
        runner_id: str,
        *,
        counted: bool = False,
    ) -> None:
        """A group failed; `counted`: not for the first time."""
        name, detail = group.environment, report.detail[:MAX_DETAIL_CHARS] or report.reason
        streak = self.streaks.setdefault(name, FailureStreak(since=self._clock()))
        streak.count += 1
        streak.groups.add(group.group_id)
        streak.detail, streak.runner_id = detail, runner_id
        log.warning(
            "group_failed", group_id=group.group_id, environment=name, reason=report.reason, detail=report.detail
        )
        if not counted:
            self._ended[name] += 1
            self._failed[name] += 1
            self._write(group, report.reason, detail, runner_id)

    def _write(self, group: runner_pb2.GroupAssignment, reason: str, detail: str, runner_id: str) -> None:
        name = group.environment
        self._metrics.write(
            "group_failed", environment=name, group_id=group.group_id, reason=reason, detail=detail, runner=runner_id,
            groups_failed=self._failed[name], groups_ended=self._ended[name],
        )  # fmt: skip
