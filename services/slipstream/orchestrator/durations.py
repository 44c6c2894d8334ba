"""How long groups take, against how long they may: an environment whose groups outlive the staleness bound.

A group is dispatched at the weights of some step, and too old to be trained `max_off_policy_steps + 1` steps later.
Where the 90th percentile of an environment's durations lies beyond, its policy of ageing out decides what is trained.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from slipstream.algorithms.staleness import AgeOut
from slipstream.orchestrator.replay import KEPT_DURATIONS, KEPT_STEP_TIMES
from slipstream.orchestrator.run_state import RunState

_FEWEST_GROUPS = 10
_FEWEST_STEPS = 3
_OVER_BELOW = 0.8
"""The warning is taken back once the percentile is below this part of the bound."""
_CHOICES = (
    '"regenerate" starts a group that grew too old once more and then gives it up, "hold" lets the step wait for it, '
    '"mask" trains only its tokens within the bound'
)


class Durations:
    """Durations of the newest groups of each environment, and of the newest steps. Warns through the run's state."""

    def __init__(
        self, policies: Mapping[str, AgeOut], max_off_policy_steps: int, state: RunState, clock: Callable[[], float]
    ) -> None:
        self._policies = policies
        self._steps = max_off_policy_steps + 1
        self._state = state
        self._clock = clock
        self._groups = {name: deque[tuple[float, float]](maxlen=KEPT_DURATIONS) for name in policies}
        self._between_s = deque[float](maxlen=KEPT_STEP_TIMES)
        self._trained_at: float | None = None

    def ended(self, environment: str, duration_s: float) -> None:
        """A group ended by itself after this time."""
        self._groups[environment].append((duration_s, duration_s))

    def cut_off(self, environment: str, age_s: float) -> None:
        """A group was given up as too old while it ran: it would have taken longer, nobody knows how much."""
        self._groups[environment].append((math.inf, age_s))

    def trained(self) -> None:
        """A step was trained: look whether its time is enough for everybody."""
        now = self._clock()
        if self._trained_at is not None:
            self._between_s.append(now - self._trained_at)
        self._trained_at = now
        step_s = self.step_s
        if step_s is None:
            return
        bound_s = self._steps * step_s
        for name, policy in self._policies.items():
            p90_s, at_least_s = self.p90_s(name)
            topic = f"outlives_bound/{name}"
            if p90_s > bound_s:
                known = f"{p90_s:.3g} s" if math.isfinite(p90_s) else f"more than {at_least_s:.3g} s"
                steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
                self._state.warn(
                    topic,
                    f"groups of environment {name!r} take {known} (90th percentile) and are too old after {steps} of "
                    f"{step_s:.3g} s; raise orchestrator.max_off_policy_steps, or choose its age_out, now "
                    f'"{policy.value}": {_CHOICES}',
                    environment=name,
                    p90_s=at_least_s,
                    step_s=step_s,
                    bound_s=bound_s,
                )
            elif p90_s < _OVER_BELOW * bound_s:
                self._state.unwarn(topic)

    @property
    def step_s(self) -> float | None:
        """Median time of a step, waits included; None before a few are trained."""
        return median(self._between_s) if len(self._between_s) >= _FEWEST_STEPS else None

    def restore(
        self,
        groups: Mapping[str, Sequence[Sequence[float | None]]],
        step_times_s: Sequence[float],
        *,
        surplus: bool = False,
    ) -> None:
        """Go on with what earlier processes saw. `surplus`: what is cut off is meant to be, and says nothing."""
        for name, known in groups.items():
            if name in self._groups:
                self._groups[name].extend(
                    (math.inf if took_s is None else took_s, least_s or 0.0)
                    for took_s, least_s in known
                    if took_s is not None or not surplus
                )
        self._between_s.extend(step_times_s)

    def p90_s(self, environment: str) -> tuple[float, float]:
        """The 90th percentile, infinite where such a group was cut off, and what it is at least; 0 of too few."""
        groups = sorted(self._groups[environment])
        if len(groups) < _FEWEST_GROUPS:
            return 0.0, 0.0
        return groups[math.ceil(0.9 * len(groups)) - 1]

    def percentiles(self) -> dict[str, float]:
        """What is known of the 90th percentile of each environment, for whoever scrapes."""
        return {name: self.p90_s(name)[1] for name in self._policies}
