"""Groups that third parties ask for through RolloutService. They are never trained on."""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.common.errors import RequestIdReused, RolloutQueueFull, RolloutUnknown
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator import telemetry
from slipstream.orchestrator.config import PROMPT
from slipstream.orchestrator.packed import packed, unpack
from slipstream.orchestrator.signals import Signal

PAGE_BYTES = 4 << 20
_MAX_ATTEMPTS = 3
_CHANGES = 4
"""Of an open group, at most, since the journal was synced last."""


@dataclass(slots=True)
class ExternalGroup:
    """One group and what was asked."""

    request: rollout_pb2.CreateRolloutRequest
    rollout: rollout_pb2.Rollout
    number: int
    attempts: int = 0
    lost: int = 0
    """Attempts whose runner was lost, or what they needed."""
    sequence: int = 0
    kept_bytes: int = 0
    """Size of the answers, counted once it has ended."""

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.rollout.state not in (rollout_pb2.ROLLOUT_STATE_QUEUED, rollout_pb2.ROLLOUT_STATE_RUNNING)

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether it has all of these labels."""
        own = self.rollout.labels
        return all(own.get(key) == value for key, value in labels.items())


@dataclass(slots=True)
class ExternalGroups:
    """Keeps every open group and the newest ended ones. Each change gets the next sequence number."""

    limit: int
    kept_ended: int = 1_000
    limit_bytes: int = 64 << 20
    """Of ended groups; the newest is kept whatever its size."""
    append: Callable[..., None] = lambda kind, **fields: None
    """To the journal: each change of a group."""
    changed: Signal = field(default_factory=Signal)
    sequence: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """Groups that have ended, by environment."""
    _number: int = 0
    _groups: OrderedDict[str, ExternalGroup] = field(default_factory=OrderedDict)
    _by_request: dict[str, str] = field(default_factory=dict[str, str])
    """Groups of earlier processes, by the request that made them."""
    _ended: deque[ExternalGroup] = field(default_factory=deque)
    _kept_bytes: int = 0
    _waiting: deque[str] = field(default_factory=deque)

    @property
    def waiting(self) -> bool:
        """Whether `take` would return a group."""
        return bool(self._waiting)

    def create(self, request: rollout_pb2.CreateRolloutRequest) -> ExternalGroup:
        """Queue a group."""
        if len(self._groups) - len(self._ended) >= self.limit:
            raise RolloutQueueFull("too many groups of third parties are open", limit=self.limit)
        rollout = rollout_pb2.Rollout(
            group_id=f"external-{uuid.uuid4().hex}",
            state=rollout_pb2.ROLLOUT_STATE_QUEUED,
            environment=request.task.environment,
            labels=request.labels,
        )
        self._number += 1
        group = ExternalGroup(request, rollout, self._number)
        self._groups[rollout.group_id] = group
        self._waiting.append(rollout.group_id)
        self._touch(group, request=packed(request))
        return group

    def asked(self, request: rollout_pb2.CreateRolloutRequest) -> ExternalGroup | None:
        """The group that an earlier process made of this request; of one that has ended the request is not kept."""
        group = self._groups.get(self._by_request.get(request.request_id, "")) if request.request_id else None
        if group is not None and not group.ended and group.request != request:
            raise RequestIdReused("this request_id came with another body before", request_id=request.request_id)
        return group

    def restore(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with the groups of earlier processes. Those that ran wait again: it is not their fault."""
        opened: list[ExternalGroup] = []
        for said in sorted(known.values(), key=lambda said: said["number"]):
            request = rollout_pb2.CreateRolloutRequest()
            rollout = rollout_pb2.Rollout(group_id=said["group"], state=rollout_pb2.ROLLOUT_STATE_QUEUED)
            if said["rollout"]:
                request.request_id = said["request_id"]
                rollout = unpack(said["rollout"], rollout_pb2.Rollout)
            else:
                request = unpack(said["request"], rollout_pb2.CreateRolloutRequest)
                rollout.environment = request.task.environment
                rollout.labels.update(request.labels)
            group = ExternalGroup(request, rollout, said["number"], said["attempts"], said["lost"], said["sequence"])
            self._groups[said["group"]] = group
            self._by_request[said["request_id"]] = said["group"]
            self._number = max(self._number, group.number)
            # Changes of which the journal had not heard when the machine failed may have been seen.
            self.sequence = max(self.sequence, group.sequence)
            if group.ended:
                self._keep(group)
            else:
                opened.append(group)
        self.sequence += _CHANGES * len(opened)
        for group in opened:
            self._waiting.append(group.rollout.group_id)
            self._touch(group)

    def get(self, group_id: str) -> ExternalGroup:
        """Return a group."""
        group = self._groups.get(group_id)
        if group is None:
            raise RolloutUnknown(f"group {group_id!r} is not known", group_id=group_id)
        return group

    def page(self, after_number: int, size: int, labels: Mapping[str, str]) -> tuple[list[ExternalGroup], bool]:
        """Return groups created after `after_number`, oldest first, and whether there are more.

        At most `size` of them, and no more than fit into a message, but at least one.
        """
        page: list[ExternalGroup] = []
        size_bytes = 0
        for group in self._groups.values():
            if group.number <= after_number or not group.has(labels):
                continue
            size_bytes += group.kept_bytes
            if page and (len(page) == size or size_bytes > PAGE_BYTES):
                return page, True
            page.append(group)
        return page, False

    def next_change(self, sequence: int, labels: Mapping[str, str]) -> ExternalGroup | None:
        """Return the group whose last change is the first one after `sequence`, or None.

        One at a time: while a watcher sends one, others change, and what changed would be sent out of order.
        """
        later = (group for group in self._groups.values() if group.sequence > sequence and group.has(labels))
        return min(later, key=lambda group: group.sequence, default=None)

    def take(self, version: PolicyVersion) -> ExternalGroup:
        """Start the next attempt of the group that waits longest."""
        group = self._groups[self._waiting.popleft()]
        group.attempts += 1
        group.rollout.state = rollout_pb2.ROLLOUT_STATE_RUNNING
        group.rollout.dispatch_version.CopyFrom(version.to_proto())
        self._touch(group)
        return group

    def again(self, group_id: str, reason: str, detail: str) -> None:
        """Queue a group whose runner is gone once more, or fail it."""
        group = self._groups.get(group_id)
        if group is None or group.ended:
            return
        group.lost += 1
        if group.lost >= _MAX_ATTEMPTS:
            self.end(group_id, rollout_pb2.ROLLOUT_STATE_FAILED, reason, detail)
        else:
            group.rollout.state = rollout_pb2.ROLLOUT_STATE_QUEUED
            self._waiting.append(group_id)
            self._touch(group)

    def end(
        self,
        group_id: str,
        state: rollout_pb2.RolloutState,
        reason: str = "",
        detail: str = "",
        report: runner_pb2.GroupReport | None = None,
    ) -> None:
        """End a group that is open, and forget the oldest ones beyond what is kept."""
        group = self._groups.get(group_id)
        if group is None or group.ended:
            return
        group.rollout.state = state
        group.rollout.reason, group.rollout.detail = reason, detail
        if report is not None:
            group.rollout.prompt = report.prompt
            group.rollout.records.extend(shown(record) for record in report.rollouts)
        if group_id in self._waiting:
            self._waiting.remove(group_id)
        request_id = group.request.request_id
        group.request.Clear()  # a prompt may be large
        group.request.request_id = request_id
        name = group.rollout.environment or PROMPT
        self.counts[name] += 1
        state_name = rollout_pb2.RolloutState.Name(state).removeprefix("ROLLOUT_STATE_")
        telemetry.external_ended.labels(name, state_name).inc()
        self._touch(group, environment=name)
        self._keep(group)

    def _keep(self, group: ExternalGroup) -> None:
        group.kept_bytes = group.rollout.ByteSize()
        self._ended.append(group)
        self._kept_bytes += group.kept_bytes
        while len(self._ended) > self.kept_ended or (self._kept_bytes > self.limit_bytes and len(self._ended) > 1):
            forgotten = self._ended.popleft()
            self._kept_bytes -= forgotten.kept_bytes
            del self._groups[forgotten.rollout.group_id]
            self._by_request.pop(forgotten.request.request_id, None)

    def end_all(self, reason: str) -> None:
        """Cancel what is open: the run is over."""
        for group_id in [name for name, group in self._groups.items() if not group.ended]:
            self.end(group_id, rollout_pb2.ROLLOUT_STATE_CANCELLED, reason, "the run ended")

    def _touch(self, group: ExternalGroup, **fields: object) -> None:
        self.sequence += 1
        group.sequence = group.rollout.sequence = self.sequence
        self.append(
            "external",
            group=group.rollout.group_id,
            number=group.number,
            attempts=group.attempts,
            lost=group.lost,
            sequence=group.sequence,
            request_id=group.request.request_id,
            rollout=packed(group.rollout) if group.ended else "",
            **fields,
        )
        self.changed.notify()


def shown(record: runner_pb2.RolloutRecord) -> runner_pb2.RolloutRecord:
    """The record without its references."""
    for name in ("token_ids", "logprobs", "routes", "further_samples"):
        record.ClearField(name)
    return record
