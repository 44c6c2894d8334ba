"""Stands beside the staleness gate: no more groups than the engines can hold. Feeds the limit, tells when it moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import structlog

from slipstream.common import errors
from slipstream.orchestrator.concurrency import ConcurrencyLimit, Reading
from slipstream.orchestrator.config import ConcurrencyConfig
from slipstream.orchestrator.keeper import Worker
from slipstream.orchestrator.metrics import MetricsFile

log = structlog.get_logger()

OVERLOADS = frozenset(
    each.reason
    for each in (errors.NoWorker, errors.PoolSaturated, errors.EngineFull, errors.Overloaded, errors.DeadlineExceeded)
)
"""Reasons of failed groups that fewer of them at once may heal."""
_TOLD_CHANGE = 0.1
"""A move is written down when the limit is so much away from what was written last."""


class ConcurrencyGate:
    """Counts in rollouts. Until the first report of an engine, or when it is off, it is open."""

    def __init__(
        self,
        config: ConcurrencyConfig,
        shares: Mapping[str, float],
        samples_per_group: int,
        metrics: MetricsFile,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._shares = shares
        self._samples_per_group = samples_per_group
        self._metrics = metrics
        self._clock = clock
        self._limit: ConcurrencyLimit | None = None
        self._told = 0
        self._overloads = 0
        self._seen_at = float("-inf")
        self.backed_off: Callable[[], Sequence[str]] = tuple
        """Environments that are backed off: their share of the rollouts is not given to others."""

    @property
    def rollouts(self) -> int | None:
        """The most rollouts in flight; None while there is no limit."""
        if self._limit is None:
            return None
        share = 1.0 - sum(self._shares[name] for name in self.backed_off())
        return max(math.ceil(self._limit.rollouts * share), min(self._config.min_rollouts, self._limit.rollouts))

    @property
    def moves(self) -> Mapping[str, int]:
        """How often the limit was lowered, by reason."""
        return self._limit.moves if self._limit is not None else {}

    def room(self, in_flight: int) -> float:
        """How many rollouts more may be dispatched; any number where nothing is in flight: one group may always run."""
        limit = self.rollouts
        return math.inf if limit is None or not in_flight else limit - in_flight

    def failed(self, reason: str) -> None:
        """A group failed."""
        self._overloads += reason in OVERLOADS

    def look(self, workers: Sequence[Worker], in_flight: int) -> bool:
        """Take in what the workers that sample and can be reached have reported; True when there is more room."""
        seen_at = max((worker.seen_at for worker in workers), default=self._seen_at)
        if not self._config.enabled or (workers and seen_at <= self._seen_at):
            return False
        self._seen_at = seen_at
        if self._limit is None:
            slots = sum(worker.slot_count for worker in workers)
            if not slots:
                return False
            self._limit = ConcurrencyLimit(self._config, slots)
        before = self.rollouts or 0
        loads = [worker.load for worker in workers]
        running = sum(load.running_sample_count for load in loads)
        requests = sum(load.waiting_request_count for load in loads)
        overloads, self._overloads = self._overloads, 0
        self._limit.observe(
            Reading(
                at_s=self._clock(),
                in_flight=in_flight,
                running=running,
                # A request may be of one sample or of a group's; no more can wait than have been handed out.
                waiting=max(0, min(requests * self._samples_per_group, in_flight - running)),
                blocks_used=sum(load.blocks_used for load in loads),
                blocks_total=sum(load.blocks_total for load in loads),
                preemptions=sum(load.preemption_count for load in loads),
                overloads=overloads,
            )
        )
        self._tell(in_flight)
        return (self.rollouts or 0) > before

    def _tell(self, in_flight: int) -> None:
        assert self._limit is not None
        limit = self._limit.rollouts
        if abs(limit - self._told) > _TOLD_CHANGE * max(self._told, 1):
            self._told = limit
            log.info("concurrency_limit", rollouts=limit, in_flight=in_flight, why=self._limit.why)
            self._metrics.write("concurrency", rollouts=limit, in_flight=in_flight, why=self._limit.why)
