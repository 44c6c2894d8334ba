"""Where the runner's spans of an attempt at a group go: those of one rollout into its trace, others into the group's.

What several rollouts share is in the group's, and a copy that is linked to it in the trace of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common import tracing
from slipstream.common.tracing import TraceContext


class AttemptTraces:
    """The traces of an attempt at a group and of its rollouts."""

    def __init__(self, assignment: runner_pb2.GroupAssignment) -> None:
        self._assignment = assignment
        name = assignment.group_id, assignment.dispatch_version.incarnation, assignment.attempt
        self.group = tracing.group_trace(*name)
        recorded = self.group is not None
        self._roots = [tracing.rollout_trace(*name, index) for index in range(assignment.sample_count * recorded)]

    def of(self, index: int) -> TraceContext | None:
        """The root of a rollout's trace; `index`: of any of its samples. None where it is not recorded."""
        return self._roots[index % len(self._roots)] if self._roots else None

    def rollout_id(self, index: int) -> str:
        """Of the rollout that a sample is of."""
        return tracing.rollout_id(
            self._assignment.group_id, self._assignment.attempt, index % self._assignment.sample_count
        )

    def span(self, name: str, indexes: Iterable[int], **attributes: Any) -> AbstractContextManager[tracing.Opened]:
        """A block of work for these rollouts."""
        if not self._roots:
            return tracing.span(name)
        roots = {self.rollout_id(index): root for index in indexes if (root := self.of(index)) is not None}
        if len(roots) == 1:
            ((rollout_id, root),) = roots.items()
            return tracing.span(name, root, rollout=rollout_id, **attributes)
        return tracing.span(name, self.group, roots, **attributes)

    def apart(self, opened: tracing.Opened, indexes: Iterable[int]) -> dict[int, tuple[str, TraceContext]]:
        """Of a block that rollouts share: each one's id, and where spans of it alone go. Nothing of a block of one."""
        if not opened.copies:
            return {}
        return {index: (name := self.rollout_id(index), opened.copies[name]) for index in indexes}


def trace_id(assignment: runner_pb2.GroupAssignment, index: int) -> str:
    """What the trace of a rollout is found by; empty where it is not recorded."""
    incarnation = assignment.dispatch_version.incarnation
    return tracing.trace_id(tracing.rollout_trace(assignment.group_id, incarnation, assignment.attempt, index))
