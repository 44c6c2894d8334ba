"""Backs an environment off that only fails, so that it neither spins nor holds the others up.

One breaker an environment:

    closed -- so many failures in a row --> open -- its pause is over --> one group as a probe
       ^                                     ^                              |
       +--------------- a group ends well ---|------------------------------+
                                             +-- the probe fails: the pause doubles, up to a bound

Nothing of an open environment is handed out but its probe; its positions are parked (`algorithms/staleness.py`), and
the rest of the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slipstream.orchestrator.config import BreakerConfig
from slipstream.orchestrator.leases import AttemptKey


@dataclass(slots=True)
class Breaker:
    """An open one."""

    pause_s: float
    due_at: float
    """When the next probe may go, on the clock."""
    probe: AttemptKey | None = None


class Breakers:
    """Which environments are let through. No I/O; `running` says whether an attempt still runs."""

    def __init__(
        self,
        config: BreakerConfig,
        environments: Iterable[str],
        clock: Callable[[], float],
        running: Callable[[AttemptKey], bool],
    ) -> None:
        self._config = config
        self._environments = tuple(environments)
        self._clock = clock
        self._running = running
        self._open: dict[str, Breaker] = {}

    @property
    def open(self) -> list[str]:
        """Environments that are backed off."""
        return list(self._open)

    def is_open(self, environment: str) -> bool:
        """Whether it is backed off."""
        return environment in self._open

    @property
    def all_open(self) -> bool:
        """Whether nothing but probes can be run."""
        return len(self._open) == len(self._environments)

    @property
    def any_allowed(self) -> bool:
        """Whether a group of any environment may be handed out now."""
        return len(self._open) < len(self._environments) or any(map(self.allows, self._environments))

    def allows(self, environment: str) -> bool:
        """Whether a group of it may be handed out now: of an open one a single probe, when its pause is over."""
        breaker = self._open.get(environment)
        if breaker is None:
            return True
        # A probe whose runner died or that was cancelled says nothing: another may go.
        under_way = breaker.probe is not None and self._running(breaker.probe)
        return not under_way and self._clock() >= breaker.due_at

    def blocks(self, environment: str) -> bool:
        """The opposite of `allows`."""
        return not self.allows(environment)

    def handed_out(self, environment: str, key: AttemptKey) -> None:
        """A group went to a runner: of an open environment it is the probe."""
        if environment in self._open:
            self._open[environment].probe = key

    def failed(self, environment: str, key: AttemptKey, failures_in_a_row: int, *, outage: bool = False) -> bool:
        """A group failed; True when that opened the breaker. What was under way when it opened changes nothing.

        `outage`: what it needs is away, so that one failure says as much as many.
        """
        breaker, now = self._open.get(environment), self._clock()
        if breaker is None:
            if failures_in_a_row < self._config.open_after_failures and not outage:
                return False
            pause_s = self._config.first_pause_s
            self._open[environment] = Breaker(pause_s, now + pause_s)
            return True
        if key == breaker.probe:
            breaker.pause_s = min(breaker.pause_s * 2, self._config.max_pause_s)
            breaker.due_at, breaker.probe = now + breaker.pause_s, None
        return False

    def pause_s(self, environment: str) -> float:
        """Between tries of it; 0 while it is let through."""
        breaker = self._open.get(environment)
        return 0.0 if breaker is None else breaker.pause_s

    def reopened(self, environment: str, pause_s: float) -> bool:
        """An earlier process had opened it: its next try is a pause away. False where there is no such environment."""
        if environment not in self._environments:
            return False
        self._open[environment] = Breaker(pause_s, self._clock() + pause_s)
        return True

    def succeeded(self, environment: str) -> bool:
        """A group ended well; True when that closed the breaker."""
        return self._open.pop(environment, None) is not None
