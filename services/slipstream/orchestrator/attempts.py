"""Attempts that runners have, with what is asked of all of them at each event kept rather than counted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.leases import AttemptKey


@dataclass(slots=True)
class Attempt:
    """One attempt that a runner has."""

    assignment: runner_pb2.GroupAssignment
    """As it was handed out; it does not change any more."""
    runner_id: str
    started_at: float
    taken_up: bool = False
    """An earlier process of the orchestrator handed it out: nobody measured how long it takes."""
    version: PolicyVersion = field(init=False)
    """It was dispatched at."""

    def __post_init__(self) -> None:
        self.version = PolicyVersion.from_proto(self.assignment.dispatch_version)

    @property
    def key(self) -> AttemptKey:
        """Name of the attempt."""
        return self.assignment.group_id, self.assignment.attempt


class RunningAttempts:
    """All of them, by name."""

    def __init__(self) -> None:
        self._by_key: dict[AttemptKey, Attempt] = {}
        self._versions: Counter[PolicyVersion] = Counter()
        self.rollout_count = 0
        """Rollouts of all attempts."""

    def add(self, attempt: Attempt) -> None:
        """Take one in, in place of one of the same name."""
        self.pop(attempt.key)
        self._by_key[attempt.key] = attempt
        self._versions[attempt.version] += 1
        self.rollout_count += attempt.assignment.sample_count

    def pop(self, key: AttemptKey) -> Attempt | None:
        """Take one out; None where there is none of that name."""
        attempt = self._by_key.pop(key, None)
        if attempt is not None:
            self.rollout_count -= attempt.assignment.sample_count
            self._versions[attempt.version] -= 1
            if not self._versions[attempt.version]:
                del self._versions[attempt.version]
        return attempt

    def get(self, key: AttemptKey) -> Attempt | None:
        """Look one up."""
        return self._by_key.get(key)

    @property
    def versions(self) -> set[PolicyVersion]:
        """Dispatch versions of all attempts."""
        return set(self._versions)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)
