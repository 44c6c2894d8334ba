"""Groups that third parties ask for through RolloutService. They are never trained on."""

from __future__ import annotations

import uuid
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.common.errors import RolloutQueueFull, RolloutUnknown
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.signals import Signal

_KEPT_ENDED = 1_000
_MAX_ATTEMPTS = 3


@dataclass(slots=True)
class ExternalGroup:
    """One group and what was asked."""

    request: rollout_pb2.CreateRolloutRequest
    rollout: rollout_pb2.Rollout
    number: int
    attempts: int = 0

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.rollout.state not in (rollout_pb2.ROLLOUT_STATE_QUEUED, rollout_pb2.ROLLOUT_STATE_RUNNING)


@dataclass(slots=True)
class ExternalGroups:
    """Keeps every open group and the newest ended ones. Each change gets the next sequence number."""

    limit: int
    changed: Signal = field(default_factory=Signal)
    sequence: int = 0
    _number: int = 0
    _groups: OrderedDict[str, ExternalGroup] = field(default_factory=OrderedDict)
    _waiting: deque[str] = field(default_factory=deque)

    @property
    def waiting(self) -> bool:
        """Whether `take` would return a group."""
        return bool(self._waiting)

    def create(self, request: rollout_pb2.CreateRolloutRequest) -> ExternalGroup:
        """Queue a group."""
        if sum(not group.ended for group in self._groups.values()) >= self.limit:
            raise RolloutQueueFull("too many groups of third parties are open", limit=self.limit)
        rollout = rollout_pb2.Rollout(
            group_id=f"external-{uuid.uuid4().hex}",
            state=rollout_pb2.ROLLOUT_STATE_QUEUED,
            environment=request.task.environment,
        )
        self._number += 1
        group = ExternalGroup(request, rollout, self._number)
        self._groups[rollout.group_id] = group
        self._waiting.append(rollout.group_id)
        self._touch(group)
        return group

    def get(self, group_id: str) -> ExternalGroup:
        """Return a group."""
        group = self._groups.get(group_id)
        if group is None:
            raise RolloutUnknown(f"group {group_id!r} is not known", group_id=group_id)
        return group

    def page(self, after_number: int, size: int) -> tuple[list[ExternalGroup], bool]:
        """Return groups created after `after_number`, oldest first, and whether there are more."""
        newer = [group for group in self._groups.values() if group.number > after_number]
        return newer[:size], len(newer) > size

    def changed_since(self, sequence: int) -> list[ExternalGroup]:
        """Return groups with a later change, in the order of their changes."""
        changed = [group for group in self._groups.values() if group.rollout.sequence > sequence]
        return sorted(changed, key=lambda group: group.rollout.sequence)

    def take(self, version: PolicyVersion) -> ExternalGroup:
        """Start the next attempt of the group that waits longest."""
        group = self._groups[self._waiting.popleft()]
        group.attempts += 1
        group.rollout.state = rollout_pb2.ROLLOUT_STATE_RUNNING
        group.rollout.dispatch_version.CopyFrom(version.to_proto())
        self._touch(group)
        return group

    def again(self, group_id: str, reason: str) -> None:
        """Queue a group whose runner is gone once more, or fail it."""
        group = self._groups.get(group_id)
        if group is None or group.ended:
            return
        if group.attempts >= _MAX_ATTEMPTS:
            self.end(group_id, rollout_pb2.ROLLOUT_STATE_FAILED, reason)
        else:
            group.rollout.state = rollout_pb2.ROLLOUT_STATE_QUEUED
            self._waiting.append(group_id)
            self._touch(group)

    def end(
        self,
        group_id: str,
        state: rollout_pb2.RolloutState,
        reason: str = "",
        records: list[runner_pb2.RolloutRecord] | None = None,
    ) -> None:
        """End a group that is open."""
        group = self._groups.get(group_id)
        if group is None or group.ended:
            return
        group.rollout.state = state
        group.rollout.reason = reason
        group.rollout.records.extend(records or [])
        if group_id in self._waiting:
            self._waiting.remove(group_id)
        self._touch(group)
        ended = [name for name, kept in self._groups.items() if kept.ended]
        for name in ended[: max(0, len(ended) - _KEPT_ENDED)]:
            del self._groups[name]

    def end_all(self, reason: str) -> None:
        """Cancel what is open: the run is over."""
        for group_id in [name for name, group in self._groups.items() if not group.ended]:
            self.end(group_id, rollout_pb2.ROLLOUT_STATE_CANCELLED, reason)

    def _touch(self, group: ExternalGroup) -> None:
        self.sequence += 1
        group.rollout.sequence = self.sequence
        self.changed.notify()
