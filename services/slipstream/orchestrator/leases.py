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
    orphans: set[AttemptKey] = field(default_factory=set[AttemptKey])
    """Of the process before, until this one says what it takes up."""
    orphans_expire_at: float = 0.0
    wake: Signal = field(default_factory=Signal)
    slot_count: int = 0
    """Groups it would run at once, when it last asked for some."""
    address: str = ""
    """Where it serves sessions; empty: it takes none."""
    spool_full: bool = False
    disk_full: bool = False


class RunnerLeases:
    """Leases of groups to runners. A lease ends with its runner's silence, or where a later process of it has not the
    group any more."""

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

    def renew(self, runner_id: str, epoch: str) -> Runner:
        """Renew a runner's lease. A later process takes over, and may take up what its predecessor had."""
        runner = self._runners.get(runner_id)
        if runner is not None and epoch < runner.epoch:
            raise RunnerSuperseded(f"runner {runner_id} was started again", runner_id=runner_id, epoch=runner.epoch)
        if runner is None or epoch > runner.epoch:
            orphans = self._remove(runner) if runner is not None else []
            runner = self._runners[runner_id] = Runner(runner_id, epoch, 0.0)
            self._leave_orphans(runner, orphans)
        runner.expires_at = self._clock() + self.ttl_s
        return runner

    def adopt(self, runner_id: str, keys: Iterable[AttemptKey]) -> None:
        """Expect a runner that had these attempts from an earlier process of the orchestrator."""
        runner = self._runners.setdefault(runner_id, Runner(runner_id, "", self._clock() + self.ttl_s))
        self._leave_orphans(runner, keys)

    def claim(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        """Lease to a runner again what it still runs."""
        if runner.orphans:
            claimed = runner.orphans.intersection(keys)
            runner.orphans -= claimed
            runner.attempts |= claimed

    def unclaimed(self, runner: Runner) -> list[AttemptKey]:
        """The runner has named all that it takes up: return what is lost."""
        lost, runner.orphans = sorted(runner.orphans), set()
        return lost

    def expire(self) -> list[tuple[Runner, list[AttemptKey]]]:
        """Remove runners that were silent for too long; return what each of them had, and what others never took up."""
        now = self._clock()
        silent = [(runner, self._remove(runner)) for runner in self.runners if runner.expires_at <= now]
        late = [runner for runner in self.runners if runner.orphans and runner.orphans_expire_at <= now]
        return silent + [(runner, self.unclaimed(runner)) for runner in late]

    def grant(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        """Lease attempts to a runner."""
        runner.attempts.update(keys)

    def drop(self, runner_id: str, key: AttemptKey) -> None:
        """Forget an attempt that ended, and with it any cancellation of it."""
        runner = self._runners.get(runner_id)
        if runner is not None:
            runner.attempts.discard(key)
            runner.orphans.discard(key)
            self._acknowledge(runner, [key])

    def cancel(self, runner_id: str, key: AttemptKey, reason: str) -> None:
        """Tell a runner, at its next heartbeat or the one that waits, to stop an attempt."""
        runner = self._runners.get(runner_id)
        if runner is not None:
            runner.attempts.discard(key)
            runner.orphans.discard(key)
            runner.cancellations[key] = reason
            runner.wake.notify()

    def acknowledge(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        """Record that the engines no longer work on these attempts."""
        self._acknowledge(runner, keys)

    async def until_acknowledged(self, timeout_s: float) -> bool:
        """Wait until no cancellation is open; False when the time ran out first."""
        return await self.acknowledged.until(lambda: not self.pending_cancellations, timeout_s)

    def _leave_orphans(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        runner.orphans.update(keys)
        runner.orphans_expire_at = self._clock() + self.ttl_s

    def _acknowledge(self, runner: Runner, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            if runner.cancellations.pop(key, None) is not None:
                self.acknowledged.notify()

    def _remove(self, runner: Runner) -> list[AttemptKey]:
        del self._runners[runner.runner_id]
        lost = sorted(runner.attempts | runner.orphans)
        runner.cancellations.clear()
        runner.wake.notify()
        self.acknowledged.notify()
        return lost
