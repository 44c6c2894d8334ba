"""How many rollouts may be in flight: as many as the engines can hold, found by trying. Pure: no clock, no I/O.

More rollouts make larger batches and so more tokens a second, until the KV cache is full: then samples wait, or lose
their KV and compute it again. What fits is known to nobody beforehand, as it depends on how long answers become. So the
limit rises while it is used and KV is free, quickly at first and after an outage, and by little otherwise; it falls to
what the engines really run when samples wait or are preempted, and with the engines themselves when some are away.

The staleness gate stands beside it and knows nothing of it; what waits here is not dispatched, and so does not age.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slipstream.orchestrator.config import ConcurrencyConfig

_QUICK, _SLOW, _BY_ROOM = 0.25, 0.02, 0.06
"""By what part the limit rises in a second: quickly, or slowly and more with all KV free."""
_IN_USE = 0.9
"""A limit of which less is used says nothing: it stays."""
_KV_AIM, _KV_FULL = 0.96, 0.985
"""Up to where KV in use may be expected to rise before the limit does, and where it counts as full."""
_AHEAD_S = 5.0
"""How far KV in use is looked ahead."""
_SMOOTHING_S = 3.0
_WAITING = 0.25
"""Samples that may wait, as a part of those that run."""
_SPARE = 32
"""Samples that may wait in any case, so that a small engine has the next at hand."""
_LEAST_LEFT = 0.85
"""What is left of the limit, at least, when samples wait: those that run may be unusually long."""
_BACK_OFF = 0.7
"""What is left of the limit after failures for want of an engine."""
_PREEMPTED = 0.97
_SETTLE_S = 3.0
"""Time that a lowered limit has to show an effect."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of the engines at one moment."""

    at_s: float
    in_flight: int
    """Rollouts that are dispatched and have not ended."""
    running: int
    """Samples that engines run."""
    waiting: int
    """Samples that wait for room at an engine, at most."""
    blocks_used: int
    blocks_total: int
    """Of the engines that can be reached, by 0 nothing is known."""
    preemptions: int = 0
    """Since the start of each engine, added up."""
    overloads: int = 0
    """Groups that failed since the last reading, as no engine took or finished them."""


class ConcurrencyLimit:
    """The limit, and why it moved last."""

    def __init__(self, config: ConcurrencyConfig, start: int) -> None:
        self._config = config
        self._limit = float(self._bounded(start))
        self.why = "start"
        self.moves: Counter[str] = Counter()
        """How often it fell, by reason."""
        self._known_good = float("inf")
        """Up to here it rises quickly: nothing has spoken against so many yet, or it was so many before an outage."""
        self._last: Reading | None = None
        self._blocks_total: int | None = None
        self._kv_rise = 0.0
        """KV in use, as a part of all, gained in a second; smoothed."""
        self._lowered_s = float("-inf")

    @property
    def rollouts(self) -> int:
        """The most rollouts that may be in flight."""
        return int(self._limit)

    def observe(self, reading: Reading) -> None:
        """Take in the next reading; one a second or so."""
        self._follow_engines(reading.blocks_total)
        if not reading.blocks_total:
            return
        last, self._last = self._last, reading
        if last is None:
            return
        passed_s = max(1e-3, reading.at_s - last.at_s)
        used = reading.blocks_used / reading.blocks_total
        rise = (used - last.blocks_used / last.blocks_total) / passed_s
        self._kv_rise += min(1.0, passed_s / _SMOOTHING_S) * (rise - self._kv_rise)
        if not self._lower(reading, last, used):
            self._raise(reading, used, min(passed_s, 2.0))

    def _follow_engines(self, blocks_total: int) -> None:
        """Fall with the engines that go away; when they are back, rise quickly to where it was."""
        before, self._blocks_total = self._blocks_total, blocks_total
        if before is None or before == blocks_total:
            return
        if blocks_total < before:
            self._known_good = max(self._known_good, self._limit)
            self._limit = self._bounded(self._limit * blocks_total / before)
            self.why = "engines_away"
            self.moves[self.why] += 1
        elif before:
            self._known_good = max(self._known_good, self._limit * blocks_total / before)

    def _lower(self, reading: Reading, last: Reading, used: float) -> bool:
        """Whether something speaks against the limit."""
        preempted = reading.preemptions > last.preemptions
        waiting = min(reading.waiting, last.waiting)  # groups that have just come wait for a moment
        crowded = waiting > max(_WAITING * reading.running, _SPARE)
        if not (preempted or crowded or reading.overloads or used > _KV_FULL):
            return False
        if reading.at_s - self._lowered_s < _SETTLE_S:
            return True
        if reading.overloads:
            self._set(min(self._limit, reading.in_flight) * _BACK_OFF, "failures", reading.at_s)
        elif crowded:
            fits = max(reading.in_flight - waiting, reading.running)
            self._set(max(float(fits), _LEAST_LEFT * self._limit), "waiting", reading.at_s)
        elif preempted:
            self._set(min(self._limit, reading.in_flight) * _PREEMPTED, "preemptions", reading.at_s)
        return True

    def _raise(self, reading: Reading, used: float, passed_s: float) -> None:
        if reading.in_flight < _IN_USE * self._limit:
            return
        expected = used + max(0.0, self._kv_rise) * _AHEAD_S
        if expected > _KV_AIM:
            return
        quick = self._limit < self._known_good
        part = _QUICK if quick else _SLOW + _BY_ROOM * (_KV_AIM - expected)
        self._limit = self._bounded(max(self._limit * (1 + part * passed_s), self._limit + passed_s))
        self.why = "room"

    def _set(self, limit: float, why: str, at_s: float) -> None:
        self._lowered_s, self._known_good = at_s, 0.0
        lower = self._bounded(limit)
        if lower < self._limit:
            self._limit = lower
            self.why = why
            self.moves[why] += 1

    def _bounded(self, limit: float) -> float:
        return min(max(limit, float(self._config.min_rollouts)), float(self._config.max_rollouts))
