"""The staleness contract as a pure state machine: no clock, no I/O, no randomness.

One `StalenessMachine` owns the life of every position of the task sequence:

    waiting -> running -> scored -> sealed -> ended(trained | skipped)
       ^          |          |
       +- lost,   +----------+--> ended(filtered | failed | aged_out | cancelled | dropped)
          regenerated

A position whose environment is `blocked` is parked instead of dispatched: it is not open, holds no slot, and goes first
once its environment is let through again. Others pass it by, so one broken environment stalls none of them.

Names used below: `B` = max_off_policy_steps, `G` = groups_per_step, `s` = next unsealed step,
`lag(group, n) = (n - 1) - dispatch step of its current attempt`.

* Consumption bound: no group is sealed for step n with lag > B (`seal`). Groups of a `mask`
  environment may be older; their tokens below `SealedStep.oldest_step` must not be trained.
* Admission bound: open groups never exceed `admission_bound` (`dispatch`).
* Cancellation: after a seal, what has `(s - 1) - dispatch step > B` is given up (`seal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class AgeOut(StrEnum):
    """What happens to a group that grows too old to be trained."""

    REGENERATE = "regenerate"
    """Start it again, once, at the version then served; the second time it ends as aged out."""
    HOLD = "hold"
    """The step that would age it out is not sealed before the group has ended, one way or the other."""
    MASK = "mask"
    """It goes on; only its tokens sampled within the bound are trained."""


class Phase(StrEnum):
    """Where a position is in its life."""

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    SCORED = "scored"
    SEALED = "sealed"
    ENDED = "ended"


class Outcome(StrEnum):
    """The one terminal outcome of a position."""

    TRAINED = "trained"
    SKIPPED = "skipped"
    FILTERED = "filtered"
    FAILED = "failed"
    AGED_OUT = "aged_out"
    CANCELLED = "cancelled"
    DROPPED = "dropped"


@dataclass(slots=True)
class Group:
    """One position of the task sequence and its current attempt."""

    position: int
    environment: str
    phase: Phase = Phase.WAITING
    attempt: int = 0
    dispatch_step: int = -1
    regenerations: int = 0
    losses: int = 0
    sealed_step: int | None = None
    outcome: Outcome | None = None

    def lag(self, step: int) -> int:
        """Return how many versions behind the weights that step `step` starts from this attempt was dispatched."""
        return (step - 1) - self.dispatch_step


@dataclass(frozen=True, slots=True)
class Cancellation:
    """An attempt that is given up. `running` attempts must be aborted at their runner; the others only hold rows."""

    position: int
    attempt: int
    environment: str
    reason: str
    running: bool
    regenerated: bool


@dataclass(frozen=True, slots=True)
class SealedStep:
    """The groups of one training step, in the order of their positions."""

    step: int
    groups: tuple[Group, ...]
    oldest_step: int
    """Tokens sampled by weights of an earlier step are beyond the bound; only `mask` environments have any."""
    cancellations: tuple[Cancellation, ...]
    last: bool = False
    """No other step comes after it."""


class IllegalTransition(ValueError):
    """An event that cannot follow from the state: a bug in the caller, never a late message."""


@dataclass(slots=True)
class StalenessMachine:
    """Admits, ages out and seals groups so that both bounds hold under any order of events.

    Late messages are expected (a report of an attempt given up meanwhile): such a call changes nothing and
    returns False. Steps seal, train and are served in order; anything else raises `IllegalTransition`.
    """

    groups_per_step: int
    max_off_policy_steps: int
    total_steps: int
    environment_of: Callable[[int], str]
    """The environment of a position: a pure function."""
    over_sampling: float = 1.0
    """Multiplies `groups_per_step` in the admission bound only."""
    age_out: Mapping[str, AgeOut] = field(default_factory=dict[str, AgeOut])
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups of each environment in a step. They yield rather than stall: see `_selection`."""
    quota_patience_groups: int | None = None
    """Scored groups beyond `groups_per_step` at which quotas yield; None means half of that."""
    max_ready_groups: int | None = None
    """Scored groups at which no new position is dispatched, and never fewer than sealing may wait for; None means that
    only the admission bound counts. More would only wait and grow older, while `max_off_policy_steps` may be as large
    as the slowest groups need."""
    total_positions: int | None = None
    """The sequence ends before this position, and the last step takes what is left of it; None means that
    `total_steps` alone ends the run."""
    max_losses: int = 3
    """Attempts of one position that may die with their runner before it ends as failed."""
    blocked: Callable[[str], bool] = lambda _: False
    """Environments of which nothing is dispatched now; asked at each dispatch, and must not change the machine."""
    max_parked: int = 1 << 16
    """Positions that may be parked; then nothing new is dispatched until an environment is let through."""

    serving_step: int = 0
    sealed_step: int = 0
    trained_step: int = 0
    next_position: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=dict[Outcome, int])
    _open: dict[int, Group] = field(default_factory=dict[int, Group])
    _scored: dict[int, Group] = field(default_factory=dict[int, Group])
    _waiting: dict[int, Group] = field(default_factory=dict[int, Group])
    _parked: dict[int, Group] = field(default_factory=dict[int, Group])

    # ---- admission

    @property
    def open_groups(self) -> int:
        """Groups that are running, waiting for another attempt, or scored and not yet trained or ended."""
        return len(self._open)

    @property
    def admission_bound(self) -> int:
        """The most groups that may be open: `min(serving + B + 1, total_steps) * G - trained groups`.

        Each trained step counts with the same multiple of G as the steps ahead: counted with G alone, the
        surplus of an over-sampled run would grow with every step.
        """
        admitted_steps = min(self.serving_step + self.max_off_policy_steps + 1, self.total_steps)
        return (admitted_steps - self.trained_step) * math.ceil(self.groups_per_step * self.over_sampling)

    @property
    def complete(self) -> bool:
        """Whether the last step is sealed: nothing is admitted any more."""
        if self.sealed_step >= self.total_steps:
            return True
        return self.exhausted and not self._parked and self._sealed_count() == len(self._open)

    @property
    def exhausted(self) -> bool:
        """Whether every position that there is has had its turn; some may be parked."""
        return self.total_positions is not None and self.next_position >= self.total_positions

    @property
    def last_step(self) -> int:
        """The step that the run ends with, as far as is known."""
        return self.sealed_step if self.complete else self.total_steps

    @property
    def gate_open(self) -> bool:
        """Whether a new position may be dispatched: when open groups are below the bound.

        Without over-sampling, being below the bound implies that the group is not born too old; with it, that
        is asked for as well. Groups that are ready in surplus close it, too.
        """
        return self.open_groups < self.admission_bound and self._fresh and not self._surplus

    @property
    def _surplus(self) -> bool:
        if self.max_ready_groups is None:
            return False
        needed = self.groups_per_step + (self._patience if self.quotas else 0)
        return len(self._scored) >= max(self.max_ready_groups, needed)

    def _may_start(self, group: Group) -> bool:
        """Whether a waiting position may start again: one that grew too old not at weights that are replaced just now,
        or a task of nearly as many steps as the bound would grow too old a second time.
        """
        return group.regenerations == 0 or self.trained_step <= self.serving_step

    @property
    def _any_left(self) -> bool:
        """Whether a position may be dispatched as far as parking is concerned."""
        new = len(self._parked) < self.max_parked and not self.exhausted
        return new or any(not self.blocked(group.environment) for group in self._parked.values())

    @property
    def _fresh(self) -> bool:
        return not self.complete and self.sealed_step - self.serving_step <= self.max_off_policy_steps

    @property
    def dispatchable(self) -> bool:
        """Whether `dispatch` may return a group: it does unless all that could come is blocked."""
        return (self._fresh and any(map(self._may_start, self._waiting.values()))) or (
            self.gate_open and self._any_left
        )

    def dispatch(self) -> Group | None:
        """Start the next attempt at the serving version: the oldest waiting position, else the oldest parked one, else
        a new one. What is blocked is passed by; None where nothing else is left.
        """
        for group in [group for group in self._waiting.values() if self.blocked(group.environment)]:
            self._park(group)
        if not self.dispatchable:
            return None
        starting = [group.position for group in self._waiting.values() if self._may_start(group)] if self._fresh else []
        if starting:
            group = self._waiting.pop(min(starting))
        else:
            group = self._unparked() or self._new()
            if group is None:
                return None
            self._open[group.position] = group
        group.phase = Phase.RUNNING
        group.attempt += 1
        group.dispatch_step = self.serving_step
        return group

    # ---- one attempt

    def scored(self, position: int, attempt: int) -> bool:
        """Record that the attempt ended with something to train on."""
        group = self._running(position, attempt)
        if group is None:
            return False
        group.phase = Phase.SCORED
        self._scored[position] = group
        return True

    def filtered(self, position: int, attempt: int) -> bool:
        """End a position that has nothing to teach; its slot is free at once."""
        return self._end_running(position, attempt, Outcome.FILTERED)

    def failed(self, position: int, attempt: int) -> bool:
        """End a position whose attempt failed; its slot is free at once."""
        return self._end_running(position, attempt, Outcome.FAILED)

    def lost(self, position: int, attempt: int, *, counted: bool = True) -> bool:
        """Give a running attempt up because its runner is gone; the position gets another one.

        Not `counted`: what it needs is away, and how often that is found out says nothing of the position.
        """
        group = self._running(position, attempt)
        if group is None:
            return False
        group.losses += counted
        if group.losses > self.max_losses:
            self._end(group, Outcome.FAILED)
        else:
            self._wait(group)
        return True

    def reopened(self, position: int) -> bool:
        """Take a scored attempt for running again: whoever has its rows is to report it once more."""
        group = self._scored.pop(position, None)
        if group is None:
            return False
        group.phase = Phase.RUNNING
        return True

    def lost_rows(self, position: int) -> bool:
        """Give a scored attempt up because the holder of its rows is gone; the position gets another one."""
        group = self._scored.pop(position, None)
        if group is None:
            return False
        self._wait(group)
        return True

    def cancel(self, position: int, reason: str = "cancelled") -> Cancellation | None:
        """End a position that is not sealed yet; None where there is nothing to cancel."""
        group = self._open.get(position) or self._parked.get(position)
        if group is None or group.phase is Phase.SEALED:
            return None
        cancellation = self._cancellation(group, reason, regenerated=False)
        self._end(group, Outcome.CANCELLED)
        return cancellation

    # ---- steps

    def serving_advanced(self, step: int) -> bool:
        """Record the version now served by every routable worker; it only moves forward."""
        if step <= self.serving_step:
            return False
        if step > self.sealed_step:
            raise IllegalTransition(f"version {step} is served before step {step} was sealed")
        self.serving_step = step
        return True

    def served_again(self, step: int) -> None:
        """Dispatch at an earlier version: engines were given what a restored trainer made once more.

        Until they have caught up, the steps that are sealed already keep the gate closed.
        """
        if step > self.sealed_step:
            raise IllegalTransition(f"version {step} is served before step {step} was sealed")
        self.serving_step = step

    @property
    def sealable(self) -> bool:
        """Whether the next step can be sealed now."""
        return self._selection() is not None

    def seal(self) -> SealedStep | None:
        """Seal the next step if it can be, and give up what is then too old for the one after it."""
        selection = self._selection()
        if selection is None:
            return None
        step = self.sealed_step + 1
        for group in selection:
            group.phase = Phase.SEALED
            group.sealed_step = step
            del self._scored[group.position]
        self.sealed_step = step
        return SealedStep(
            step,
            tuple(sorted(selection, key=lambda group: group.position)),
            max(0, step - 1 - self.max_off_policy_steps),
            tuple(self._give_up_too_old()),
            self.complete,
        )

    def trained(self, step: int, *, skipped: bool = False) -> list[Group]:
        """End the groups of a sealed step; a repeat of an earlier step returns nothing."""
        if step <= self.trained_step:
            return []
        if step != self.trained_step + 1 or step > self.sealed_step:
            raise IllegalTransition(f"step {step} cannot be trained after step {self.trained_step}")
        groups = [group for group in self._open.values() if group.sealed_step == step]
        for group in groups:
            self._end(group, Outcome.SKIPPED if skipped else Outcome.TRAINED)
        self.trained_step = step
        return groups

    # ---- after a crash

    def restore(
        self,
        groups: Iterable[Group],
        *,
        serving_step: int,
        sealed_step: int,
        trained_step: int,
        next_position: int,
        outcomes: Mapping[Outcome, int],
    ) -> tuple[Cancellation, ...]:
        """Take up where another machine of the same settings ended.

        Returns what it sealed past and had not given up yet: that is given up now.
        """
        self.serving_step, self.sealed_step, self.trained_step = serving_step, sealed_step, trained_step
        self.next_position = next_position
        self.outcomes = dict(outcomes)
        groups = list(groups)
        self._open = {group.position: group for group in groups if group.phase is not Phase.PARKED}
        self._parked = {group.position: group for group in groups if group.phase is Phase.PARKED}
        self._scored = {group.position: group for group in self._open.values() if group.phase is Phase.SCORED}
        self._waiting = {group.position: group for group in self._open.values() if group.phase is Phase.WAITING}
        return tuple(self._give_up_too_old())

    # ---- looking

    def __iter__(self) -> Iterator[Group]:
        return iter(self._open.values())

    @property
    def parked(self) -> list[Group]:
        """Positions that were passed by, as their environment is blocked."""
        return list(self._parked.values())

    @property
    def frontier(self) -> int:
        """The lowest position that has not ended."""
        return min((*self._open, *self._parked), default=self.next_position)

    def group(self, position: int) -> Group | None:
        """Return an open group."""
        return self._open.get(position)

    def count(self, phase: Phase) -> int:
        """Return how many open groups are in `phase`."""
        if phase is Phase.SCORED:
            return len(self._scored)
        if phase is Phase.WAITING:
            return len(self._waiting)
        if phase is Phase.PARKED:
            return len(self._parked)
        return sum(group.phase is phase for group in self._open.values())

    # ---- inside

    def _running(self, position: int, attempt: int) -> Group | None:
        group = self._open.get(position)
        if group is None or group.attempt != attempt or group.phase is not Phase.RUNNING:
            return None
        return group

    def _end_running(self, position: int, attempt: int, outcome: Outcome) -> bool:
        group = self._running(position, attempt)
        if group is None:
            return False
        self._end(group, outcome)
        return True

    def _wait(self, group: Group) -> None:
        group.phase = Phase.WAITING
        self._scored.pop(group.position, None)
        self._waiting[group.position] = group

    def _park(self, group: Group) -> None:
        group.phase = Phase.PARKED
        self._open.pop(group.position, None)
        self._waiting.pop(group.position, None)
        self._parked[group.position] = group

    def _unparked(self) -> Group | None:
        """Take the oldest parked position that is let through again."""
        free = [group.position for group in self._parked.values() if not self.blocked(group.environment)]
        return self._parked.pop(min(free)) if free else None

    def _new(self) -> Group | None:
        """Take the next position of the sequence; those that are blocked are parked on the way."""
        while len(self._parked) < self.max_parked and not self.exhausted:
            group = Group(self.next_position, self.environment_of(self.next_position))
            self.next_position += 1
            if not self.blocked(group.environment):
                return group
            self._park(group)
        return None

    def _end(self, group: Group, outcome: Outcome) -> None:
        group.phase = Phase.ENDED
        group.outcome = outcome
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self._open.pop(group.position, None)
        self._parked.pop(group.position, None)
        self._scored.pop(group.position, None)
        self._waiting.pop(group.position, None)

    def _policy(self, group: Group) -> AgeOut:
        return self.age_out.get(group.environment, AgeOut.REGENERATE)

    def _ages_out_with(self, group: Group, step: int) -> bool:
        """Whether sealing `step` makes the attempt too old for the step after it."""
        return group.lag(step + 1) > self.max_off_policy_steps

    def _selection(self) -> list[Group] | None:
        """Choose the groups of the next step: what would find no room later first, oldest first, within the quotas.

        Quotas yield when the groups that are missing cannot come (nothing runs and nothing may start) or
        when enough others have piled up.
        """
        step, size = self.sealed_step + 1, self.groups_per_step
        if self.exhausted and not self._parked and len(self._scored) + self._sealed_count() == len(self._open):
            size = min(size, len(self._scored))  # what is left of the sequence
        if step > self.total_steps or not size or len(self._scored) < size:
            return None
        urgent = self._urgent(step)
        if urgent is None:
            return None
        ordered = sorted(
            self._scored.values(),
            key=lambda group: (group.position not in urgent, group.dispatch_step, group.position),
        )
        if not self.quotas:
            return ordered[:size]
        left = dict(self.quotas)
        chosen: list[Group] = []
        surplus: list[Group] = []
        for group in ordered:
            if left.get(group.environment, 0) > 0 or group.position in urgent:
                left[group.environment] = left.get(group.environment, 0) - 1
                chosen.append(group)
            else:
                surplus.append(group)
        if len(chosen) >= size:
            return chosen[:size]
        idle = len(self._scored) + self._sealed_count() == len(self._open)
        stuck = idle and not self.dispatchable and self.serving_step == self.sealed_step
        if stuck or len(self._scored) >= size + self._patience:
            return (chosen + surplus)[:size]
        return None

    def _urgent(self, step: int) -> set[int] | None:
        """Scored groups for which the steps after `step` have no room before they are too old.

        The groups dispatched up to some version can be trained in `size` places a step, up to the last step that may
        take that version; what is beyond goes now, oldest first. None where a held group that still runs would be left
        without a place: then the step waits for it.
        """
        size, scored = self.groups_per_step, list[Group]()
        held = held_scored = need = 0
        counted = sorted(
            (group for group in self._open.values() if self._needs_a_place(group)),
            key=lambda group: (group.dispatch_step, group.position),
        )
        for index, group in enumerate(counted):
            if group.phase is Phase.SCORED:
                scored.append(group)
            if self._policy(group) is AgeOut.HOLD:
                held += 1
                held_scored += group.phase is Phase.SCORED
            if index + 1 < len(counted) and counted[index + 1].dispatch_step == group.dispatch_step:
                continue
            places = size * max(0, group.dispatch_step + self.max_off_policy_steps + 1 - step)
            if held > held_scored and held - min(held_scored, size) > places:
                return None
            need = max(need, index + 1 - places)
        return {group.position for group in scored[:need]}

    def _needs_a_place(self, group: Group) -> bool:
        """Whether it must be trained before it is too old: if it is scored, or sure to be."""
        policy = self._policy(group)
        if policy is AgeOut.MASK:
            return False
        return group.phase is Phase.SCORED or (group.phase is Phase.RUNNING and policy is AgeOut.HOLD)

    @property
    def _patience(self) -> int:
        return self.groups_per_step // 2 if self.quota_patience_groups is None else self.quota_patience_groups

    def _must_go(self, group: Group, step: int) -> bool:
        return self._policy(group) is not AgeOut.MASK and self._ages_out_with(group, step)

    def _sealed_count(self) -> int:
        return self.count(Phase.SEALED)

    def _give_up_too_old(self) -> Iterator[Cancellation]:
        for group in [*self._open.values(), *(self._parked.values() if self.complete else ())]:
            if group.phase is Phase.SEALED:
                continue
            if self.complete:
                yield self._cancellation(group, "run_complete", regenerated=False)
                self._end(group, Outcome.DROPPED)
            elif group.phase is not Phase.WAITING and self._must_go(group, self.sealed_step):
                again = group.regenerations == 0
                yield self._cancellation(group, "aged_out", regenerated=again)
                if again:
                    group.regenerations += 1
                    self._wait(group)
                else:
                    self._end(group, Outcome.AGED_OUT)

    def _cancellation(self, group: Group, reason: str, *, regenerated: bool) -> Cancellation:
        running = group.phase is Phase.RUNNING
        return Cancellation(group.position, group.attempt, group.environment, reason, running, regenerated)
