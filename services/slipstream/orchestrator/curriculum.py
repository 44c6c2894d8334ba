"""Which task a position runs where success rates choose: mostly such as are neither always right nor always wrong.

A task is of the part of its number modulo `parts`, and each part has a running success rate `p` of its groups. From the
candidates of a position, which follow from seed and position alone, the first is taken that a draw, which does so too,
accepts with chance `4 p (1 - p)`, or `floor` if that is less: tasks are drawn in proportion to what the variance of
their rewards lets them teach. A part that was never asked counts as even.

What was chosen, and each new rate, is in the journal, beside the records of the positions: `acquired` has `task`,
`reported` and `ended` have `success`. A process that takes the run up goes on from there, and no report counts twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.orchestrator.config import EnvironmentConfig
from slipstream.orchestrator.replay import History
from slipstream.orchestrator.role_rewards import success_share
from slipstream.orchestrator.tasks import TaskSequence

MAX_CANDIDATES = 128
"""Looked at for a position; then the likeliest of them is taken."""
EVEN = 0.5
MAX_SHOWN_PARTS = 16
"""Parts of an environment whose rates are in the record of each step."""

PartKey = tuple[str, int]
"""An environment's part."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of the groups of one part."""

    rate: float = EVEN
    group_count: int = 0

    def after(self, share: float, memory_groups: int) -> Rate:
        """With another group, of which that share was right. The first ones count beside one that was even."""
        weight = 1 / min(self.group_count + 2, memory_groups)
        return Rate(self.rate + (share - self.rate) * weight, self.group_count + 1)


class Curriculum:
    """Chooses tasks for positions, and learns from what becomes of them."""

    def __init__(self, tasks: TaskSequence, environments: Mapping[str, EnvironmentConfig]) -> None:
        self._tasks = tasks
        self._environments = environments
        self.rates: dict[PartKey, Rate] = {}
        self._chosen: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        """The attempt of a position that its part's rate has taken in."""

    def restore(self, history: History) -> None:
        """Go on from what the journal says."""
        self.rates = {key: Rate(rate, count) for key, (rate, count) in history.success_rates.items()}
        self._chosen, self._counted = dict(history.tasks), dict(history.counted)

    def task_index(self, position: int) -> int | None:
        """The task of a position, the same for all its attempts; None leaves it to the task sequence."""
        name = self._tasks.environment_of(position)
        if not self._environments[name].curriculum.enabled:
            return None
        if position not in self._chosen:
            self._chosen[position] = self._choose(position, name)
        return self._chosen[position]

    def took(
        self, assignment: runner_pb2.GroupAssignment, records: Sequence[runner_pb2.RolloutRecord]
    ) -> dict[str, Any]:
        """Learn from an attempt that ended; returns what the journal's record of that says."""
        if assignment.HasField("session_group"):
            return {}
        config = self._environments[assignment.environment]
        counted = self._counted.get(assignment.position) == assignment.attempt
        if not config.curriculum.enabled or counted:
            return {}
        part = assignment.task_index % parts_of(config)
        share = sum(map(success_share, records)) / len(records)
        rate = self._rate(config.name, part).after(share, config.curriculum.memory_groups)
        self.rates[config.name, part] = rate
        self._counted[assignment.position] = assignment.attempt
        return {"success": [config.name, part, rate.rate, rate.group_count]}

    def forget_all_but(self, positions: Iterable[int]) -> None:
        """Positions that are not open any more will not be asked for."""
        open_positions = set(positions)
        for kept in (self._chosen, self._counted):
            for position in kept.keys() - open_positions:
                del kept[position]

    def mean_rates(self) -> dict[str, float]:
        """Over the parts that were asked, by environment."""
        found: dict[str, list[float]] = defaultdict(list)
        for (name, _), rate in list(self.rates.items()):
            found[name].append(rate.rate)
        return {name: sum(rates) / len(rates) for name, rates in found.items()}

    def fields(self) -> dict[str, object]:
        """What the record of a step says; nothing where no environment has one."""
        on = [config for config in self._environments.values() if config.curriculum.enabled]
        if not on:
            return {}
        counts = {config.name: sum(name == config.name for name, _ in self.rates) for config in on}
        return {
            "success_rate_by_environment": {name: round(rate, 4) for name, rate in self.mean_rates().items()},
            "parts_asked_by_environment": counts,
            "success_rate_by_part": {
                f"{config.name}/{part}": round(self.rates[config.name, part].rate, 4)
                for config in on
                if parts_of(config) <= MAX_SHOWN_PARTS
                for part in range(parts_of(config))
                if (config.name, part) in self.rates
            },
        }

    def _rate(self, name: str, part: int) -> Rate:
        return self.rates.get((name, part), Rate())

    def _choose(self, position: int, name: str) -> int:
        config = self._environments[name]
        likeliest, highest = 0, -1.0
        for number in range(MAX_CANDIDATES):
            index, draw = self._tasks.candidate(position, number)
            rate = self._rate(name, index % parts_of(config)).rate
            chance = max(4 * rate * (1 - rate), config.curriculum.floor)
            if draw < chance:
                return index
            if chance > highest:
                likeliest, highest = index, chance
        return likeliest


def parts_of(config: EnvironmentConfig) -> int:
    """Parts of an environment's training set that have a rate each."""
    return config.curriculum.parts or config.train_task_count
