"""What the roles of rollouts earned: for advantages, for what counts as success, and for the figures of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from slipstream.algorithms.role_advantages import RoleResult
from slipstream.api.rollout.v1 import runner_pb2

Sample = runner_pb2.RolloutRecord | runner_pb2.RolloutSample


def samples_of(record: runner_pb2.RolloutRecord) -> list[Sample]:
    """A rollout's samples, the first of which is in the record itself."""
    return [record, *record.further_samples]


def trained_samples(record: runner_pb2.RolloutRecord) -> list[tuple[int, Sample]]:
    """Those of roles that train, all where there are no roles, with their numbers."""
    untrained = {each.role for each in record.role_rewards if each.untrained}
    return [(number, each) for number, each in enumerate(samples_of(record)) if each.role not in untrained]


def trained_roles(record: runner_pb2.RolloutRecord) -> list[runner_pb2.RoleReward]:
    """The roles of a rollout that train; none where there are no roles."""
    return [each for each in record.role_rewards if not each.untrained]


def results_of(record: runner_pb2.RolloutRecord) -> dict[str, RoleResult]:
    """What its roles that train came to."""
    counts: dict[str, int] = defaultdict(int)
    for _, sample in trained_samples(record):
        counts[sample.role] += sum(part.end - part.start for part in sample.loss_ranges)
    return {each.role: RoleResult(each.reward, counts[each.role]) for each in trained_roles(record)}


def reward_of(record: runner_pb2.RolloutRecord, role: str) -> float:
    """Of one of its roles; the rollout's own where there are none."""
    return next((each.reward for each in record.role_rewards if each.role == role), record.reward)


def success_share(record: runner_pb2.RolloutRecord) -> float:
    """How right a rollout is, for a curriculum: the part of its roles that train and are right."""
    roles = trained_roles(record)
    return sum(each.correct for each in roles) / len(roles) if roles else float(record.correct)


class RoleRewards:
    """Rewards by environment and role, of the rollouts that ended in an interval."""

    def __init__(self) -> None:
        self._rewards: dict[str, list[float]] = defaultdict(list)

    def add(self, environment: str, records: Iterable[runner_pb2.RolloutRecord]) -> None:
        """Count the roles of some rollouts, those that do not train as well."""
        for record in records:
            for each in record.role_rewards:
                self._rewards[f"{environment}/{each.role}"].append(each.reward)

    def fields(self) -> dict[str, object]:
        """What the record of a step says; nothing where no environment has roles."""
        return role_reward_fields(self._rewards)


def role_reward_fields(rewards: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Mean rewards by `environment/role`; nothing where there are none."""
    means = {name: sum(each) / len(each) for name, each in rewards.items() if each}
    return {"reward_by_role": means} if means else {}
