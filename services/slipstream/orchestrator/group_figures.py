"""How old the open groups of each environment are: for Prometheus at each scrape, and for the record of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from slipstream.algorithms.staleness import Group, Phase

AGES = {Phase.RUNNING: "in_flight", Phase.SCORED: "in_queue"}
"""Where a group can grow old: while its rollouts run, and while it waits for a step."""


class GroupFigures:
    """Remembers when the open positions began, and how many attempts were not the first."""

    def __init__(
        self, names: Iterable[str], clock: Callable[[], float], name_of: Callable[[Group], str] | None = None
    ) -> None:
        """`name_of`: what a group is counted under; its environment, unless told otherwise."""
        self._clock = clock
        self._name_of = name_of or (lambda group: group.environment)
        self._begun: dict[int, float] = {}
        self._zeros = dict.fromkeys(names, 0.0)
        self.again: Counter[str] = Counter()
        """Attempts that were not the first of their group, by environment."""

    def dispatched(self, group: Group) -> None:
        """An attempt begins."""
        if group.attempt > 1:
            self.again[self._name_of(group)] += 1
        self.known(group)

    def known(self, group: Group) -> None:
        """A group is open, from now on at the latest."""
        self._begun.setdefault(group.position, self._clock())

    def lags(self, groups: Iterable[Group], next_step: int) -> dict[tuple[str, str], float]:
        """The most versions that a group lags the next step, by (environment, where)."""
        found = {(environment, where): 0.0 for environment in self._zeros for where in AGES.values()}
        for group in groups:
            if group.phase in AGES:
                key = (self._name_of(group), AGES[group.phase])
                found[key] = max(found[key], group.lag(next_step))
        return found

    def oldest_s(self, groups: Iterable[Group]) -> dict[str, float]:
        """Seconds since the oldest open group of each environment was handed out first, here; sealed ones apart."""
        now, found = self._clock(), dict(self._zeros)
        for group in groups:
            if group.phase is not Phase.SEALED:
                age_s = now - self._begun.get(group.position, now)
                name = self._name_of(group)
                found[name] = max(found[name], age_s)
        return found

    def fields(self, groups: Iterable[Group], next_step: int) -> Mapping[str, object]:
        """What the record of a step says of them; groups that have ended meanwhile are forgotten."""
        groups = list(groups)
        for position in self._begun.keys() - {group.position for group in groups}:
            del self._begun[position]
        lags = self.lags(groups, next_step)
        return {
            **{
                f"lag_{where}_by_environment": {name: lags[name, where] for name in self._zeros}
                for where in AGES.values()
            },
            "oldest_group_s_by_environment": {name: round(age, 3) for name, age in self.oldest_s(groups).items()},
            "groups_again_by_environment": {name: self.again[name] for name in self._zeros},
        }
