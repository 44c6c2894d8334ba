"""Groups that third parties ask for through RolloutService. They are never trained on."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream.common import tracing
from slipstream.common.errors import RolloutQueueFull, RolloutUnknown
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator import telemetry
from slipstream.orchestrator.changes import Changes
from slipstream.orchestrator.config import PROMPT
from slipstream.orchestrator.ledger import Asked, Ledger, asked_by, labelled
from slipstream.orchestrator.line import Line
from slipstream.orchestrator.packed import packed, unpack
from slipstream.orchestrator.signals import Signal

KIND = "external"
_MAX_ATTEMPTS = 3
_CHANGES = 4
"""Of an open group, at most, since the journal was synced last."""


@dataclass(slots=True)
class ExternalGroup:
    """One group and what was asked."""

    request: rollout_pb2.CreateRolloutRequest
    rollout: rollout_pb2.Rollout
    number: int
    asked: Asked
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

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return self.rollout.group_id

    @property
    def labels(self) -> Mapping[str, str]:
        """Its creator's own marks."""
        return self.rollout.labels

    @property
    def size_bytes(self) -> int:
        """As it is told."""
        return self.kept_bytes or self.rollout.ByteSize()

    kind = KIND
    trains = False

    @property
    def rollout_count(self) -> int:
        """Its members."""
        return self.request.sample_count


class ExternalGroups:
    """Keeps every open group and the newest ended ones. Each change gets the next sequence number."""

    def __init__(
        self,
        line: Line,
        limit: int,
        kept_ended: int = 1_000,
        kept_bytes: int = 64 << 20,
        append: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        """`limit`: of groups that are open. `append`: to the journal, each change of a group."""
        self.ledger = Ledger[ExternalGroup](kept_ended, kept_bytes)
        self.changed = Signal()
        self.sequence = 0
        self.counts: Counter[str] = Counter()
        """Groups that have ended, by environment."""
        self._changes = Changes[ExternalGroup]()
        self._line = line
        self._limit = limit
        self._append = append

    def create(self, request: rollout_pb2.CreateRolloutRequest) -> ExternalGroup:
        """Queue a group, or return the one that this request made before."""
        asked = asked_by(request)
        known = self.ledger.asked(asked)
        if known is not None:
            return known
        if self.ledger.open_count >= self._limit:
            raise RolloutQueueFull(
                f"{self._limit} groups of third parties are open already (orchestrator.max_external_rollouts)",
                name="orchestrator.max_external_rollouts",
                limit=self._limit,
            )
        rollout = rollout_pb2.Rollout(
            group_id=f"external-{uuid.uuid4().hex}",
            state=rollout_pb2.ROLLOUT_STATE_QUEUED,
            environment=request.task.environment,
            labels=request.labels,
        )
        group = ExternalGroup(request, rollout, self.ledger.last_number + 1, asked)
        self.ledger.enter(group)
        self._line.join(group)
        self._touch(group, request=packed(request))
        return group

    def restore(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with the groups of earlier processes. Those that ran wait again: it is not their fault."""
        restored: list[ExternalGroup] = []
        opened: list[ExternalGroup] = []
        for said in sorted(known.values(), key=lambda said: said["number"]):
            request = rollout_pb2.CreateRolloutRequest()
            rollout = rollout_pb2.Rollout(group_id=said["group"], state=rollout_pb2.ROLLOUT_STATE_QUEUED)
            if said["rollout"]:
                rollout = unpack(said["rollout"], rollout_pb2.Rollout)
            else:
                request = unpack(said["request"], rollout_pb2.CreateRolloutRequest)
                rollout.environment = request.task.environment
                rollout.labels.update(request.labels)
            group = ExternalGroup(
                request,
                rollout,
                said["number"],
                Asked.of_record(said),
                said["attempts"],
                said["lost"],
                said["sequence"],
            )
            self.ledger.enter(group)
            restored.append(group)
            # Changes of which the journal had not heard when the machine failed may have been seen.
            self.sequence = max(self.sequence, group.sequence)
            if not group.ended:
                opened.append(group)
        for group in sorted(restored, key=lambda group: group.sequence):
            if group.ended:
                self._changes.add(group.sequence, group)
        for group in restored:
            if group.ended:
                self._keep(group)
        self.sequence += _CHANGES * len(opened)
        for group in opened:
            self._line.join(group)
            self._touch(group)

    def get(self, group_id: str) -> ExternalGroup:
        """Return a group."""
        group = self.ledger.get(group_id)
        if group is None:
            raise RolloutUnknown(f"group {group_id!r} is not known", group_id=group_id)
        return group

    def next_change(self, sequence: int, labels: Mapping[str, str]) -> tuple[int, ExternalGroup | None]:
        """Return the group with these labels whose last change is the first one after `sequence`, or None.

        Before it, the sequence number to ask on from.
        """
        return self._changes.after(sequence, lambda group: labelled(group, labels))

    def take(self, group: ExternalGroup, version: PolicyVersion) -> ExternalGroup:
        """Start the next attempt of a group that waits."""
        self._line.leave(group)
        group.attempts += 1
        group.rollout.state = rollout_pb2.ROLLOUT_STATE_RUNNING
        group.rollout.dispatch_version.CopyFrom(version.to_proto())
        group.rollout.trace_id = tracing.trace_id(tracing.group_trace(group.name, version.incarnation, group.attempts))
        self._touch(group)
        return group

    def again(self, group_id: str, reason: str, detail: str) -> None:
        """Queue a group whose runner is gone once more, or fail it."""
        group = self.ledger.get(group_id)
        if group is None or group.ended:
            return
        group.lost += 1
        if group.lost >= _MAX_ATTEMPTS:
            self.end(group_id, rollout_pb2.ROLLOUT_STATE_FAILED, reason, detail)
        else:
            group.rollout.state = rollout_pb2.ROLLOUT_STATE_QUEUED
            self._line.join(group)
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
        group = self.ledger.get(group_id)
        if group is None or group.ended:
            return
        group.rollout.state = state
        group.rollout.reason, group.rollout.detail = reason, detail
        if report is not None:
            group.rollout.prompt = report.prompt
            group.rollout.records.extend(shown(record) for record in report.rollouts)
        self._line.leave(group)
        group.request = rollout_pb2.CreateRolloutRequest()  # a prompt may be large
        name = group.rollout.environment or PROMPT
        self.counts[name] += 1
        state_name = rollout_pb2.RolloutState.Name(state).removeprefix("ROLLOUT_STATE_")
        telemetry.external_ended.labels(name, state_name).inc()
        self._touch(group, environment=name)
        self._keep(group)

    def _keep(self, group: ExternalGroup) -> None:
        group.kept_bytes = group.rollout.ByteSize()
        for forgotten in self.ledger.ended(group):
            self._changes.drop(forgotten.sequence)

    def end_all(self, reason: str) -> None:
        """Cancel what is open: the run is over."""
        for group_id in [group.name for group in self.ledger if not group.ended]:
            self.end(group_id, rollout_pb2.ROLLOUT_STATE_CANCELLED, reason, "the run ended")

    def _touch(self, group: ExternalGroup, **fields: object) -> None:
        self.sequence += 1
        self._changes.drop(group.sequence)
        group.sequence = group.rollout.sequence = self.sequence
        self._changes.add(self.sequence, group)
        self._append(
            "external",
            group=group.rollout.group_id,
            number=group.number,
            attempts=group.attempts,
            lost=group.lost,
            sequence=group.sequence,
            **group.asked.as_record(),
            rollout=packed(group.rollout) if group.ended else "",
            **fields,
        )
        self.changed.notify()


def shown(record: runner_pb2.RolloutRecord) -> runner_pb2.RolloutRecord:
    """The record without its references."""
    for name in ("token_ids", "logprobs", "routes", "further_samples"):
        record.ClearField(name)
    return record
