"""The orchestrator's spans of the traces of rollouts and of their groups: running at a runner, waiting for a step, the
step that trains them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common import tracing
from slipstream.common.tracing import TraceContext
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.leases import AttemptKey
from slipstream.orchestrator.sealer import SealedPlan

TRAINING = runner_pb2.GROUP_PURPOSE_TRAINING
FINISHED = "finished"
GIVEN_UP = "given_up"
REMEMBERED = 4096
"""Attempts that wait for a step, or for its end; the oldest is forgotten first."""


class Moment(NamedTuple):
    """Of two clocks."""

    at: float
    """Of the sequencer's, which no one sets."""
    unix_s: float


class GroupTraces:
    """Writes a span as each stretch ends. Lengths are those of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._now()
        self._since: OrderedDict[AttemptKey, Moment] = OrderedDict()
        """When the stretch of a traced attempt began that it is in. Of one that an earlier process knew, it is in it
        for as long as this one goes on."""

    def ended(
        self,
        assignment: runner_pb2.GroupAssignment,
        started_at: float,
        outcome: str,
        report: runner_pb2.GroupReport | None = None,
    ) -> None:
        """An attempt is over at its runner, or given up: the first spans of its trace and of those of its rollouts."""
        key = assignment.group_id, assignment.attempt
        name = assignment.group_id, assignment.dispatch_version.incarnation, assignment.attempt
        if (group := tracing.group_trace(*name)) is None:
            return
        now = self._now()
        between = now.unix_s - (now.at - started_at), now.unix_s
        said = {"group_id": key[0], "attempt": key[1], "environment": assignment.environment}
        outcomes = _outcomes(assignment, outcome, report)
        traces = {index: tracing.rollout_trace(*name, index) for index in outcomes}
        links = list(traces.values())
        tracing.record_between("group", group, *between, root=True, links=links, outcome=outcome, **said)
        for index, of_rollout in outcomes.items():
            tracing.record_between("rollout", traces[index], *between, root=True, links=[group],
                                   rollout=tracing.rollout_id(*key, index), outcome=of_rollout, **said)  # fmt: skip
        if outcome == FINISHED and assignment.purpose == TRAINING:
            self._note(key, now)

    def sealed(self, plan: SealedPlan) -> None:
        """A step took these: what they waited for."""
        self._stretch("queue", plan, None)

    def trained(self, plan: SealedPlan, version: PolicyVersion) -> None:
        """The step that took them was trained."""
        self._stretch("training", plan, tracing.step_trace(str(version)))
        for key in plan.attempts:
            self._since.pop(key, None)

    def _stretch(self, name: str, plan: SealedPlan, step: TraceContext | None) -> None:
        """Of each rollout that trains, and of each group that one is of; the next one begins where it ends."""
        at = self._clock()
        groups: dict[tuple[str, int, int], Moment] = {}
        rollouts = tracing.planned_rollouts(plan.plans)
        for each in rollouts:
            groups[each[:3]] = self._since.get((each.group_id, each.attempt), self._began)
        ends = {group: Moment(at, since.unix_s + at - since.at) for group, since in groups.items()}
        said: dict[str, Any] = {"links": [step], "step": plan.step}
        for group, since in groups.items():
            tracing.record_between(name, tracing.group_trace(*group), since.unix_s, ends[group].unix_s, **said)
        for each in rollouts:
            between = groups[each[:3]].unix_s, ends[each[:3]].unix_s
            rollout_id = tracing.rollout_id(each.group_id, each.attempt, each.sample_index)
            tracing.record_between(name, tracing.rollout_trace(*each), *between, rollout=rollout_id, **said)
        for (group_id, _, attempt), end in ends.items():
            self._note((group_id, attempt), end)

    def _now(self) -> Moment:
        return Moment(self._clock(), tracing.now_s())

    def _note(self, key: AttemptKey, now: Moment) -> None:
        self._since[key] = now
        if len(self._since) > REMEMBERED:
            self._since.popitem(last=False)


def _outcomes(
    assignment: runner_pb2.GroupAssignment, outcome: str, report: runner_pb2.GroupReport | None
) -> dict[int, str]:
    """What became of each rollout of an attempt."""
    if report is None or outcome != FINISHED:
        return dict.fromkeys(range(assignment.sample_count), outcome)
    outcomes = dict.fromkeys(range(assignment.sample_count), GIVEN_UP)
    outcomes |= {failure.sample_index: failure.reason.lower() for failure in report.failures}
    return outcomes | {record.sample_index: FINISHED for record in report.rollouts}
