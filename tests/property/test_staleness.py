"""The staleness contract under any interleaving of its events."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.staleness import AgeOut, Cancellation, Group, Outcome, Phase, SealedStep, StalenessMachine

ENVIRONMENTS: tuple[str, ...] = ("words", "numbers")

HOLD: dict[str, AgeOut] = {"words": AgeOut.HOLD, "numbers": AgeOut.HOLD}


def environment_of(position: int) -> str:
    return ENVIRONMENTS[position % 4 == 3]


class Run:
    """Drives one machine with random events and checks what must hold after each of them."""

    def __init__(self, machine: StalenessMachine, seed: int, *, trainable: float = 0.7) -> None:
        self.machine = machine
        self.random = random.Random(seed)
        self.trainable = trainable
        self.terminal: Counter[int] = Counter()
        self.trained_positions: Counter[int] = Counter()
        self.sealed: list[SealedStep] = []
        self.lags: list[int] = []
        self.given_up: list[Cancellation] = []
        self.served_step = 0
        """The newest that was ever served: a restored trainer has engines go back."""

    def check(self) -> None:
        machine = self.machine
        assert machine.trained_step <= machine.sealed_step
        if machine.over_sampling == 1.0:
            bound = min(machine.serving_step + machine.max_off_policy_steps + 1, machine.total_steps)
            assert machine.admission_bound == bound * machine.groups_per_step - sum(self.trained_positions.values())
            room = machine.open_groups < machine.admission_bound
            enough = machine.max_ready_groups is not None and machine.count(Phase.SCORED) >= machine.groups_per_step
            assert machine.gate_open == room or (room and enough)
            steps = min(self.served_step + machine.max_off_policy_steps + 1, machine.total_steps)
            assert machine.open_groups <= steps * machine.groups_per_step - sum(self.trained_positions.values())
        # A trained step lowers the bound by its over-sampled size, while its surplus stays open to the next.
        ahead = machine.max_off_policy_steps + 1
        assert machine.open_groups <= ahead * math.ceil(machine.groups_per_step * machine.over_sampling)

    def dispatch(self) -> bool:
        open_before, gate, bound = self.machine.open_groups, self.machine.gate_open, self.machine.admission_bound
        group = self.machine.dispatch()
        if group is None:
            assert not gate or self.machine.count(Phase.WAITING) or self.machine.count(Phase.PARKED)
            return False
        assert group.dispatch_step == self.machine.serving_step
        assert group.lag(self.machine.sealed_step + 1) <= self.machine.max_off_policy_steps, "born too old"
        if group.attempt == 1:
            assert open_before < bound
        return True

    def running(self) -> list[Group]:
        return [group for group in self.machine if group.phase is Phase.RUNNING]

    def finish(self, group: Group) -> None:
        position, attempt = group.position, group.attempt
        if self.random.random() < self.trainable:
            assert self.machine.scored(position, attempt)
        elif self.random.random() < 0.5:
            assert self.machine.filtered(position, attempt)
            self.terminal[position] += 1
        else:
            assert self.machine.failed(position, attempt)
            self.terminal[position] += 1
        assert not self.machine.scored(position, attempt), "a repeat changes nothing"
        assert not self.machine.lost(position, attempt)

    def lose(self, group: Group) -> None:
        assert self.machine.lost(group.position, group.attempt)
        self.terminal[group.position] += group.outcome is Outcome.FAILED

    def seal(self) -> bool:
        sealed = self.machine.seal()
        if sealed is None:
            return False
        assert len(sealed.groups) == self.machine.groups_per_step
        for group in sealed.groups:
            assert group.sealed_step == sealed.step
            if self.machine.age_out.get(group.environment) is not AgeOut.MASK:
                assert 0 <= group.lag(sealed.step) <= self.machine.max_off_policy_steps
            self.lags.append(group.lag(sealed.step))
        for cancellation in sealed.cancellations:
            assert self.machine.age_out.get(cancellation.environment) is not AgeOut.MASK or self.machine.complete
            self.terminal[cancellation.position] += not cancellation.regenerated
        self.sealed.append(sealed)
        self.given_up += sealed.cancellations
        return True

    def train(self) -> bool:
        step = self.machine.trained_step + 1
        if step > self.machine.sealed_step:
            return False
        groups = self.machine.trained(step)
        assert len(groups) == self.machine.groups_per_step
        assert self.machine.trained(step) == []
        for group in groups:
            assert group.outcome is Outcome.TRAINED
            self.trained_positions[group.position] += 1
            self.terminal[group.position] += 1
        return True

    def serve(self) -> bool:
        if self.machine.trained_step <= self.machine.serving_step:
            return False
        step = self.random.randint(self.machine.serving_step + 1, self.machine.trained_step)
        self.served_step = max(self.served_step, step)
        return self.machine.serving_advanced(step)

    def resume(self) -> None:
        """Kill the process: the next one has what a journal says, and groups whose runner, or rows, went with it."""
        before = self.machine
        self.machine = replace(before)
        given_up = self.machine.restore(
            [replace(group) for group in [*before, *before.parked]],
            serving_step=before.serving_step,
            sealed_step=before.sealed_step,
            trained_step=before.trained_step,
            next_position=before.next_position,
            outcomes=before.outcomes,
        )
        assert given_up == ()
        assert list(self.machine) == list(before)
        for name in ("open_groups", "admission_bound", "gate_open", "dispatchable", "sealable", "frontier", "complete"):
            assert getattr(self.machine, name) == getattr(before, name), name
        for group in list(self.machine):
            if group.phase is Phase.RUNNING and self.random.random() < 0.3:
                assert self.machine.lost(group.position, group.attempt, counted=False)
            elif group.phase is Phase.SCORED and self.random.random() < 0.3:
                given_back = self.machine.reopened if self.random.random() < 0.5 else self.machine.lost_rows
                assert given_back(group.position)

    def restore_trainer(self) -> None:
        """Kill the trainer: engines are given the checkpoint's step, of the next incarnation."""
        self.machine.served_again(self.random.randint(0, self.machine.serving_step))

    def event(self, kind: int) -> None:
        running = self.running()
        match kind:
            case 0 | 1 | 2:
                self.dispatch()
            case 3 | 4 | 5 if running:
                self.finish(self.random.choice(running))
            case 6:
                self.seal()
            case 7:
                self.train()
            case 8:
                self.serve()
            case 9 if running:
                self.lose(self.random.choice(running))
            case 10 if self.machine.open_groups:
                position = self.random.choice([group.position for group in self.machine])
                self.terminal[position] += self.machine.cancel(position) is not None
            case 11:
                self.resume()
            case 12:
                self.restore_trainer()
        self.check()

    def to_the_end(self, *, limit: int = 20_000) -> None:
        """Let everything that can happen happen; a machine that stalls never gets there."""
        for _ in range(limit):
            if self.machine.trained_step == self.machine.total_steps:
                break
            progress = self.dispatch()
            self.check()
            if running := self.running():
                self.finish(self.random.choice(running))
                progress = True
            progress |= self.seal() or self.train() or self.serve()
            self.check()
            assert progress, "stalled"
        assert self.machine.trained_step == self.machine.total_steps
        assert self.machine.open_groups == 0
        assert not self.machine.dispatchable
        assert self.terminal == Counter(range(self.machine.next_position)), "one terminal outcome each"
        assert sum(self.machine.outcomes.values()) == self.machine.next_position
        assert set(self.trained_positions.values()) <= {1}, "nothing is trained twice"
        assert sum(self.trained_positions.values()) == self.machine.total_steps * self.machine.groups_per_step


policies: st.SearchStrategy[dict[str, AgeOut]] = st.dictionaries(
    st.sampled_from(ENVIRONMENTS), st.sampled_from(list(AgeOut)), max_size=2
)


@st.composite
def machines(draw: st.DrawFn) -> StalenessMachine:
    groups = draw(st.integers(1, 6))
    quota = draw(st.integers(0, groups))
    return StalenessMachine(
        groups_per_step=groups,
        max_off_policy_steps=draw(st.integers(0, 3)),
        total_steps=draw(st.integers(1, 8)),
        environment_of=environment_of,
        over_sampling=draw(st.sampled_from([1.0, 1.0, 1.5, 2.0])),
        age_out=draw(policies),
        quotas=draw(st.sampled_from([{}, {"words": groups - quota, "numbers": quota}])),
        quota_patience_groups=draw(st.sampled_from([None, 0, 2])),
        max_ready_groups=draw(st.sampled_from([None, None, 1, 3, 6])),
    )


@settings(max_examples=400, deadline=None)
@given(machines(), st.integers(0, 2**32), st.lists(st.integers(0, 12), max_size=150))
def test_both_bounds_hold_and_nothing_stalls_under_any_interleaving(
    machine: StalenessMachine, seed: int, events: list[int]
) -> None:
    run = Run(machine, seed)
    for kind in events:
        run.event(kind)
    run.to_the_end()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32), st.lists(st.integers(0, 9), max_size=150))
def test_with_bound_zero_nothing_crosses_an_update(groups: int, steps: int, seed: int, events: list[int]) -> None:
    machine = StalenessMachine(groups, 0, steps, environment_of)
    run = Run(machine, seed)
    for kind in events:
        run.event(kind)
        assert all(
            group.dispatch_step == machine.serving_step
            for group in machine
            if group.phase in (Phase.RUNNING, Phase.SCORED)
        )
    run.to_the_end()
    assert set(run.lags) == {0}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(2, 8), st.integers(0, 2**32))
def test_hold_without_filters_trains_every_admitted_group_and_ages_none_out(
    groups: int, bound: int, steps: int, seed: int
) -> None:
    machine = StalenessMachine(groups, bound, steps, environment_of, age_out=HOLD)
    run = Run(machine, seed, trainable=1.0)
    run.to_the_end()
    assert machine.outcomes == {Outcome.TRAINED: groups * steps}
    assert run.given_up == []


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(2, 10), st.booleans(), st.integers(0, 2**32))
def test_held_groups_find_a_place_however_late_they_end(
    groups: int, bound: int, steps: int, quotas: bool, seed: int
) -> None:
    """`numbers` end only when nothing else goes on: steps that took others in their place would leave them none."""
    quota = {"words": groups - groups // 2, "numbers": groups // 2} if quotas else {}
    machine = StalenessMachine(groups, bound, steps, environment_of, age_out={"numbers": AgeOut.HOLD}, quotas=quota)
    run = Run(machine, seed, trainable=1.0)
    for _ in range(20_000):
        if machine.trained_step == steps:
            break
        progress = run.dispatch()
        if quick := [group for group in run.running() if group.environment == "words"]:
            run.finish(quick[0])
            progress = True
        progress |= run.seal() or run.train() or run.serve()
        run.check()
        if not progress:
            assert run.running(), "stalled"
            run.finish(run.random.choice(run.running()))
    assert machine.trained_step == steps
    assert [c for c in run.given_up if c.reason == "aged_out" and c.environment == "numbers"] == []


@settings(max_examples=200, deadline=None)
@given(
    machines(),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 12), st.sets(st.sampled_from(ENVIRONMENTS))), max_size=100),
)
def test_blocked_environments_are_passed_by_and_keep_their_positions(
    machine: StalenessMachine, seed: int, events: list[tuple[int, set[str]]]
) -> None:
    blocked: set[str] = set()
    machine.blocked = blocked.__contains__
    machine.max_parked = 12
    run = Run(machine, seed)
    for kind, now_blocked in events:
        blocked.clear()
        blocked.update(now_blocked)
        running = {(group.position, group.attempt) for group in run.running()}
        run.event(kind)
        machine = run.machine
        for group in run.running():
            # What was scored may be to be reported again.
            assert (group.position, group.attempt) in running or group.environment not in blocked or kind == 11
        parked = {group.position for group in machine.parked}
        assert not parked & {group.position for group in machine}
        assert len(parked) <= machine.max_parked + machine.admission_bound + 50
        assert machine.frontier == min([*parked, *(group.position for group in machine)], default=machine.next_position)
        ended = set(run.terminal)
        assert parked | ended | {group.position for group in machine} == set(range(machine.next_position))
    blocked.clear()
    run.to_the_end()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from([AgeOut.REGENERATE, AgeOut.MASK]), st.integers(0, 2**32))
def test_rollouts_of_ten_times_the_bound_neither_stall_the_run_nor_break_it(
    groups: int, bound: int, policy: AgeOut, seed: int
) -> None:
    """`numbers` never ends by itself within the bound; the other environment keeps the run going."""
    steps = 12
    machine = StalenessMachine(groups, bound, steps, environment_of, age_out={"numbers": policy})
    run = Run(machine, seed, trainable=1.0)
    started: dict[tuple[int, int], int] = {}
    for _ in range(20_000):
        if machine.trained_step == steps:
            break
        while run.dispatch():
            pass
        for group in run.running():
            slow = group.environment == "numbers"
            begun = started.setdefault((group.position, group.attempt), machine.serving_step)
            # With every slot held by a slow rollout only its own end can help: it fails at its deadline.
            overdue = machine.serving_step - begun >= 10 * (bound + 1) or not machine.gate_open
            if not slow or (overdue and not any(g.environment == "words" for g in run.running())):
                run.finish(group)
        run.check()
        if not (run.seal() or run.train()):
            run.serve()
        run.check()
    assert machine.trained_step == steps
    assert run.terminal == Counter(range(machine.next_position))
    if policy is AgeOut.REGENERATE:
        again = Counter(c.position for c in run.given_up if c.reason == "aged_out" and c.regenerated)
        assert set(again.values()) <= {1}, "started again once"


def test_regeneration_takes_the_oldest_position_first_and_ends_the_second_time() -> None:
    machine = StalenessMachine(1, 0, 4, lambda _: "words", over_sampling=3.0)
    first, second, third = (machine.dispatch() for _ in range(3))
    assert first
    assert second
    assert third
    machine.scored(third.position, 1)
    sealed = machine.seal()
    assert sealed is not None
    assert [(c.position, c.regenerated) for c in sealed.cancellations] == [(0, True), (1, True)]
    assert machine.dispatch() is None, "version 1 is not served yet: a new attempt would be born too old"
    machine.trained(1)
    machine.serving_advanced(1)
    again = machine.dispatch()
    assert again
    assert again is first
    assert (again.position, again.attempt, again.dispatch_step) == (0, 2, 1)
    assert not machine.scored(0, 1), "a report of the attempt given up is late"
    machine.dispatch()
    machine.scored(1, 2)
    sealed = machine.seal()
    assert sealed is not None
    assert [(c.position, c.regenerated) for c in sealed.cancellations] == [(0, False)]
    assert machine.outcomes[Outcome.AGED_OUT] == 1


def test_quotas_yield_to_the_other_environment_rather_than_stall() -> None:
    machine = StalenessMachine(2, 0, 1, lambda _: "words", quotas={"words": 1, "numbers": 1})
    for _ in range(2):
        group = machine.dispatch()
        assert group is not None
        assert machine.seal() is None
        machine.scored(group.position, 1)
    sealed = machine.seal()
    assert sealed is not None
    assert len(sealed.groups) == 2


def test_what_is_ready_in_surplus_stops_new_groups_until_a_step_takes_it() -> None:
    machine = StalenessMachine(2, 5, 9, lambda _: "words", max_ready_groups=3)
    groups = [machine.dispatch() for _ in range(4)]
    for group in groups[:2]:
        assert group is not None
        machine.scored(group.position, 1)
        assert machine.dispatchable
    assert groups[2] is not None
    machine.scored(groups[2].position, 1)
    assert machine.open_groups < machine.admission_bound
    assert machine.dispatch() is None
    assert machine.seal() is not None
    assert machine.dispatch() is not None


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 17), st.integers(0, 2**32), st.lists(st.integers(0, 9)))
def test_a_run_that_ends_at_a_position_trains_exactly_those_below_it(
    groups: int, bound: int, positions: int, seed: int, events: list[int]
) -> None:
    """Without filters and with `hold`, whatever dies on the way; the last step takes what is left."""
    steps = math.ceil(positions / groups)
    machine = StalenessMachine(
        groups, bound, steps + 3, environment_of, age_out=HOLD, total_positions=positions, max_losses=1000
    )
    run = Run(machine, seed, trainable=1.0)
    trained: list[int] = []

    def train() -> bool:
        step = machine.trained_step + 1
        if step > machine.sealed_step:
            return False
        trained.extend(group.position for group in machine.trained(step))
        return True

    def seal() -> bool:
        sealed = machine.seal()
        if sealed is None:
            return False
        assert not sealed.cancellations
        assert len(sealed.groups) == groups or sealed.last
        assert sealed.last == machine.complete
        return True

    for kind in events:
        running = run.running()
        match kind:
            case 0 | 1 | 2 | 3:
                machine.dispatch()
            case 4 | 5 if running:
                run.finish(run.random.choice(running))
            case 6:
                seal()
            case 7:
                train()
            case 8:
                run.serve()
            case 9 if running:
                run.lose(run.random.choice(running))
    for _ in range(500):
        if machine.complete and machine.trained_step == machine.last_step:
            break
        progress = machine.dispatch() is not None
        if running := run.running():
            run.finish(run.random.choice(running))
            progress = True
        assert seal() or train() or run.serve() or progress, "stalled"
    assert sorted(trained) == list(range(positions))
    assert (machine.last_step, machine.open_groups, machine.dispatchable) == (steps, 0, False)
