"""Groups that failed, by environment: for the log, `metrics.jsonl`, and what an environment that only fails comes to.

It is backed off (`breakers.py`), the run pauses while all of them are, and the supervisor ends a run one of whose
environments had no success for `failing_environment_timeout_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.errors import SandboxAway, TeacherAway
from slipstream.orchestrator.breakers import Breakers
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.run_state import ENVIRONMENTS, RunState

log = structlog.get_logger()

MAX_DETAIL_CHARS = 512
KEPT_GROUPS = 64
"""Names of groups that the journal keeps of a streak."""
TOO_FEW_MEMBERS = "TOO_FEW_MEMBERS"
BAD_ADVANTAGES = "BAD_ADVANTAGES"
OUTAGES = frozenset({SandboxAway.reason, TeacherAway.reason})
"""Reasons that say nothing of the group: what it needs is away."""


@dataclass(slots=True)
class FailureStreak:
    """Attempts at groups of one environment that failed since its last success."""

    count: int = 0
    since: float = 0.0
    detail: str = ""
    runner_id: str = ""
    groups: set[str] = field(default_factory=set)
    """Fewer than attempts: a problem of an evaluation is tried again. Bounded, as probes become rare."""

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

    def __init__(
        self,
        metrics: MetricsFile,
        clock: Callable[[], float],
        breakers: Breakers,
        state: RunState,
        journal: Journal,
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._breakers = breakers
        self._state = state
        self._ended: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self.streaks: dict[str, FailureStreak] = {}

    def finished(self, environment: str, *, counted: bool = False) -> None:
        """A group ended well; `counted`: it had failed before."""
        self._ended[environment] += not counted
        streak = self.streaks.pop(environment, None)
        if self._breakers.succeeded(environment):
            self._journal.append("healed", environment=environment)
            away_s = self._clock() - streak.since if streak else 0.0
            log.info("environment_healed", environment=environment, after_s=round(away_s, 1))
            self._metrics.write("environment", environment=environment, state="healed", after_s=away_s)
            self._state.unwarn(_topic(environment))
            self._state.resume(ENVIRONMENTS)

    def useless(self, group: runner_pb2.GroupAssignment, runner_id: str, reason: str, detail: str) -> None:
        """A group that counts as finished turned out to be of no use."""
        self._failed[group.environment] += 1
        self._ended[group.environment] = max(self._ended[group.environment], self._failed[group.environment])
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
        outage = report.reason in OUTAGES
        self._back_off(name, (group.group_id, group.attempt), streak, outage=outage)
        if outage:
            log.info("group_to_be_run_again", group_id=group.group_id, environment=name, reason=report.reason)
            return
        log.warning(
            "group_failed", group_id=group.group_id, environment=name, reason=report.reason, detail=report.detail
        )
        if not counted:
            self._ended[name] += 1
            self._failed[name] += 1
            self._write(group, report.reason, detail, runner_id)

    def _back_off(self, name: str, key: tuple[str, int], streak: FailureStreak, *, outage: bool) -> None:
        before_s = self._breakers.pause_s(name)
        opened = self._breakers.failed(name, key, streak.count, outage=outage)
        pause_s = self._breakers.pause_s(name)
        if opened or pause_s != before_s:
            self._journal.append(
                "backed_off",
                environment=name,
                pause_s=pause_s,
                count=streak.count,
                groups=sorted(streak.groups)[-KEPT_GROUPS:],
                detail=streak.detail,
                runner=streak.runner_id,
            )
        if opened:
            self._metrics.write("environment", environment=name, state="backed_off", detail=streak.detail)
            self._show(name, streak)

    def _show(self, name: str, streak: FailureStreak) -> None:
        sentence = f"environment {name!r} is backed off and tried now and then: {streak.detail}"
        self._state.warn(_topic(name), sentence, environment=name)
        if self._breakers.all_open:
            every = len(self._breakers.open) > 1
            self._state.pause(
                ENVIRONMENTS, f"every environment is backed off, the last as {sentence}" if every else sentence
            )

    def restore(self, backed_off: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what an earlier process had backed off. For how long is counted anew: meanwhile nobody tried."""
        for name, said in backed_off.items():
            if not self._breakers.reopened(name, said["pause_s"]):
                continue  # the run has no such environment any more
            streak = FailureStreak(said["count"], self._clock(), said["detail"], said["runner"])
            streak.groups.update(said["groups"])
            self.streaks[name] = streak
            self._show(name, streak)

    def pardon(self, now: float) -> None:
        """Nothing could be tried, for another reason: no streak grew longer meanwhile."""
        for streak in self.streaks.values():
            streak.since = now

    def _write(self, group: runner_pb2.GroupAssignment, reason: str, detail: str, runner_id: str) -> None:
        name = group.environment
        self._metrics.write(
            "group_failed", environment=name, group_id=group.group_id, reason=reason, detail=detail, runner=runner_id,
            groups_failed=self._failed[name], groups_ended=self._ended[name],
        )  # fmt: skip


def _topic(environment: str) -> str:
    return f"backed_off/{environment}"
