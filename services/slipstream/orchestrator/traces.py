"""The orchestrator's spans of a group's trace: running at a runner, waiting for a step, the step that trains it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common import tracing
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.leases import AttemptKey

TRAINING = runner_pb2.GROUP_PURPOSE_TRAINING
FINISHED = "finished"
REMEMBERED = 4096
"""Traced groups that wait for a step, or for its end; the oldest is forgotten first."""


class GroupTraces:
    """Writes a span as each stretch ends. Times are those of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: OrderedDict[AttemptKey, float] = OrderedDict()
        """When the stretch of a traced attempt began that it is in."""

    def ended(self, assignment: runner_pb2.GroupAssignment, started_at: float, outcome: str) -> None:
        """An attempt is over at its runner, or given up: the first span of its trace, which all others are below."""
        key = assignment.group_id, assignment.attempt
        if (trace := tracing.group_trace(*key)) is None:
            return
        now = self._clock()
        tracing.record("group", trace, now - started_at, root=True, group_id=key[0], attempt=key[1],
                       environment=assignment.environment, outcome=outcome)  # fmt: skip
        if outcome == FINISHED and assignment.purpose == TRAINING:
            self._note(key, now)

    def sealed(self, keys: Iterable[AttemptKey], step: int) -> None:
        """A step took these: what they waited for."""
        now = self._clock()
        for key in keys:
            since = self._since.pop(key, None)
            if since is not None:
                tracing.record("queue", tracing.group_trace(*key), now - since, step=step)
                self._note(key, now)

    def trained(self, keys: Iterable[AttemptKey], version: PolicyVersion) -> None:
        """A step that took these was trained."""
        now = self._clock()
        for key in keys:
            since = self._since.pop(key, None)
            if since is not None:
                links = [tracing.step_trace(str(version))]
                tracing.record("training", tracing.group_trace(*key), now - since, links=links, step=version.step)

    def _note(self, key: AttemptKey, now: float) -> None:
        self._since[key] = now
        if len(self._since) > REMEMBERED:
            self._since.popitem(last=False)
