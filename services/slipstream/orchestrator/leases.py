"""Which runner has which group, and what it has yet to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slipstream.common.errors import RunnerSuperseded
from slipstream.orchestrator.signals import Signal

AttemptKey = tuple[str, int]
"""(group_id, attempt)."""


@dataclass(slots=True)
class Runner:
    """One runner's process."""

    runner_id: str
    epoch: str
    expires_at: float
    attempts: set[AttemptKey] = field(default_factory=set[AttemptKey])
    cancellations: dict[AttemptKey, str] = field(default_factory=dict[AttemptKey, str])
    told: set[AttemptKey] = field(default_factory=set[AttemptKey])
    """Cancellations that its last heartbeat returned."""
    wake: Signal = field(default_factory=Signal)
    spool_full: bool = False
    disk_full: bool = False


class RunnerLeases:
    """Leases of groups to runners. A lease ends with its runner's silence or with a later epoch of it."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._runners: dict[str, Runner] = {}
        self.acknowledged = Signal()
        """Notified when a cancellation is acknowledged or its runner is gone."""

    @property
    def runners(self) -> list[Runner]:
        """The runners that live."""
        return list(self._runners.values())

    @property
    def pending_cancellations(self) -> int:
        """Cancellations that engines may still be working on."""
        return sum(len(runner.cancellations) for runner in self._runners.values())

    def renew(self, runner_id: str, epoch: str) -> tuple[Runner, list[AttemptKey]]:
        """Renew a runner's lease. A later epoch takes over; the attempts its predecessor had are returned as lost."""
        runner = self._runners.get(runner_id)
        lost: list[AttemptKey] = []
        if runner is not None and epoch < runner.epoch:
            raise RunnerSuperseded(f"runner {runner_id} was started again", runner_id=runner_id, epoch=runner.epoch)
        if runner is None or epoch > runner.epoch:
            if runner is not None:
                lost = self._remove(runner)
            runner = self._runners[runner_id] = Runner(runner_id, epoch, 0.0)
        runner.expires_at = self._clock() + self.ttl_s
        return runner, lost

    def expire(self) -> list[tuple[Runner, list[AttemptKey]]]:
        """Remove runners that were silent for too long; return what each of them had."""
        now = self._clock()
        return [(runner, self._remove(runner)) for runner in self.runners if runner.expires_at <= now]

    def grant(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        """Lease attempts to a runner."""
        runner.attempts.update(keys)

    def drop(self, runner_id: str, key: AttemptKey) -> None:
        """Forget an attempt that ended, and with it any cancellation of it."""
        runner = self._runners.get(runner_id)
        if runner is not None:
            runner.attempts.discard(key)
            self._acknowledge(runner, [key])

    def cancel(self, runner_id: str, key: AttemptKey, reason: str) -> None:
        """Tell a runner, at its next heartbeat or the one that waits, to stop an attempt."""
        runner = self._runners.get(runner_id)
        if runner is not None:
            runner.attempts.discard(key)
            runner.cancellations[key] = reason
            runner.wake.notify()

    def acknowledge(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        """Record that the engines no longer work on these attempts."""
        self._acknowledge(runner, keys)

    async def until_acknowledged(self, timeout_s: float) -> bool:
        """Wait until no cancellation is open; False when the time ran out first."""
        return await self.acknowledged.until(lambda: not self.pending_cancellations, timeout_s)

    def _acknowledge(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            if runner.cancellations.pop(key, None) is not None:
                self.acknowledged.notify()

    def _remove(self, runner: Runner) -> list[AttemptKey]:
        del self._runners[runner.runner_id]
        lost = sorted(runner.attempts)
        runner.cancellations.clear()
        runner.wake.notify()
        self.acknowledged.notify()
        return lost
