"""`metrics.jsonl`: one JSON object a line, for the report and for whoever reads along."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.disk import AppendFile, PatientFile
from slipstream.orchestrator.role_rewards import RoleRewards
from slipstream.orchestrator.sealer import sampled_token_count

_KEPT_FILES = 1
_BUFFER_BYTES = 16 << 20


class MetricsFile:
    """Appends records of a `kind`, each with the time it was made; they wait while the disk is full."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        limit_bytes: int = 0,
        follower: Callable[[Mapping[str, object]], None] | None = None,
    ) -> None:
        """`limit_bytes`: on disk, of this file and the older one that it becomes; 0 means no bound.

        `follower` is shown every record.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = PatientFile(AppendFile(path, limit_bytes // (_KEPT_FILES + 1), _KEPT_FILES), _BUFFER_BYTES)
        self._clock = clock
        self._follower = follower

    def write(self, kind: str, **fields: object) -> None:
        """Append one record; figures that are not finite are left out, since JSON has none."""
        record = {"kind": kind, "time_s": round(self._clock(), 3), **finite(fields)}
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if self._follower is not None:
            self._follower(record)

    def flush(self) -> bool:
        """Write what waits; False while the disk has no room."""
        return self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(fields: Mapping[str, object]) -> dict[str, object]:
    """Drop the figures that are infinite or not a number."""
    return {key: value for key, value in fields.items() if not isinstance(value, float) or math.isfinite(value)}


class StepInterval:
    """What came in from runners since the last step record."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.groups_filtered = 0
        self.groups_failed = 0
        self.sampled_tokens = 0
        self.cached_tokens = 0
        self.prefix_query_tokens = 0
        self.rollouts_given_up = 0
        self.given_up_tokens = 0
        self.rewards: dict[str, list[float]] = defaultdict(list)
        self.role_rewards = RoleRewards()

    def add(self, environment: str, records: Sequence[runner_pb2.RolloutRecord]) -> None:
        """Count the rollouts of one finished training group."""
        self.role_rewards.add(environment, records)
        rewards = self.rewards[environment]
        for record in records:
            rewards.append(record.reward)
            self.sampled_tokens += sampled_token_count(record)
            self.cached_tokens += record.cached_token_count
            self.prefix_query_tokens += record.prefix_query_token_count

    def add_given_up(self, report: runner_pb2.GroupReport) -> None:
        """Count what was drawn and not taken."""
        self.rollouts_given_up += report.given_up_count
        self.given_up_tokens += report.given_up_token_count

    def fields(self, now_s: float) -> dict[str, object]:
        """Return the figures of the interval."""
        elapsed = max(now_s - self.started_s, 1e-6)
        return {
            **reward_fields(self.rewards),
            **self.role_rewards.fields(),
            "groups_filtered": self.groups_filtered,
            "groups_failed": self.groups_failed,
            "rollouts": sum(map(len, self.rewards.values())),
            "rollouts_given_up": self.rollouts_given_up,
            "given_up_token_count": self.given_up_tokens,
            "tokens_per_s": self.sampled_tokens / elapsed,
            "cached_token_fraction": self.cached_tokens / max(self.prefix_query_tokens, 1),
            "cached_token_count": self.cached_tokens,
            "prefix_query_token_count": self.prefix_query_tokens,
            "interval_s": elapsed,
        }


def reward_fields(rewards: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Mean rewards by environment, and over all rollouts."""
    every = [reward for each in rewards.values() for reward in each]
    return {
        "reward_mean": sum(every) / len(every) if every else math.nan,
        "reward_by_environment": {name: sum(each) / len(each) for name, each in rewards.items() if each},
    }


class Totals:
    """Counts over the whole run."""

    def __init__(self) -> None:
        self.cancelled: Counter[str] = Counter()
        self.sandbox_executions = 0
        self.rollouts = 0
        self.groups_filtered = 0
        self.trained: Counter[str] = Counter()
        """Groups, by environment."""

    def to_record(self) -> dict[str, object]:
        """Return the counts as the journal keeps them."""
        return {
            "cancelled": dict(self.cancelled),
            "sandbox_executions": self.sandbox_executions,
            "rollouts": self.rollouts,
            "groups_filtered": self.groups_filtered,
            "trained": dict(self.trained),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Go on from such a record; an empty one says nothing."""
        self.cancelled.update(record.get("cancelled", {}))
        self.sandbox_executions += record.get("sandbox_executions", 0)
        self.rollouts += record.get("rollouts", 0)
        self.groups_filtered += record.get("groups_filtered", 0)
        self.trained.update(record.get("trained", {}))

    def fields(self) -> dict[str, float]:
        """Return the counts by name."""
        return {
            "rollouts_cancelled": float(sum(self.cancelled.values())),
            "sandbox_executions": float(self.sandbox_executions),
            "rollouts": float(self.rollouts),
            "groups_filtered_in_run": float(self.groups_filtered),
        }
