"""Leases of groups to runners."""

from __future__ import annotations

import pytest

from slipstream.common.errors import RunnerSuperseded
from slipstream.orchestrator.leases import RunnerLeases


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_silent_runner_loses_its_groups_and_a_heard_one_keeps_them() -> None:
    clock = Clock()
    leases = RunnerLeases(10.0, clock)
    silent = leases.renew("runner-1", "a")
    heard = leases.renew("runner-2", "a")
    leases.grant(silent, [("train-0", 1)])
    leases.grant(heard, [("train-1", 1)])
    clock.now = 8.0
    leases.renew("runner-2", "a")
    clock.now = 12.0
    assert [(runner.runner_id, lost) for runner, lost in leases.expire()] == [("runner-1", [("train-0", 1)])]
    assert leases.runners == [heard]


def test_a_later_epoch_takes_over_and_the_earlier_one_is_told() -> None:
    leases = RunnerLeases(10.0, Clock())
    first = leases.renew("runner-1", "1")
    leases.grant(first, [("train-0", 1), ("train-1", 1)])
    later = leases.renew("runner-1", "2")
    assert leases.runners == [later]
    assert not later.attempts
    with pytest.raises(RunnerSuperseded):
        leases.renew("runner-1", "1")


def test_a_later_epoch_has_what_it_takes_up_and_the_rest_is_lost_once_it_has_said_all() -> None:
    leases = RunnerLeases(10.0, Clock())
    leases.grant(leases.renew("runner-1", "1"), [("train-0", 1), ("train-1", 1), ("train-2", 1)])
    later = leases.renew("runner-1", "2")
    leases.claim(later, [("train-1", 1), ("train-9", 1)])
    leases.drop("runner-1", ("train-2", 1))  # its report came
    assert later.attempts == {("train-1", 1)}
    assert leases.unclaimed(later) == [("train-0", 1)]
    assert leases.unclaimed(later) == []


def test_what_a_later_epoch_does_not_take_up_in_time_is_lost() -> None:
    clock = Clock()
    leases = RunnerLeases(10.0, clock)
    leases.grant(leases.renew("runner-1", "1"), [("train-0", 1), ("train-1", 1)])
    clock.now = 5.0
    later = leases.renew("runner-1", "2")
    leases.claim(later, [("train-1", 1)])
    clock.now = 14.0
    leases.renew("runner-1", "2")
    assert leases.expire() == []
    clock.now = 15.0
    assert leases.expire() == [(later, [("train-0", 1)])]
    assert later.attempts == {("train-1", 1)}


def test_what_a_runner_had_from_an_earlier_orchestrator_waits_for_it_and_not_for_ever() -> None:
    clock = Clock()
    leases = RunnerLeases(10.0, clock)
    leases.adopt("runner-1", [("train-0", 1)])
    leases.adopt("runner-2", [("train-1", 1)])
    heard = leases.renew("runner-1", "7")
    leases.claim(heard, [("train-0", 1)])
    assert heard.attempts == {("train-0", 1)}
    clock.now = 9.0
    leases.renew("runner-1", "7")
    clock.now = 10.0
    assert [(runner.runner_id, lost) for runner, lost in leases.expire()] == [("runner-2", [("train-1", 1)])]


async def test_an_update_waits_for_acknowledgements_and_not_longer_than_told() -> None:
    leases = RunnerLeases(10.0, Clock())
    runner = leases.renew("runner-1", "1")
    leases.grant(runner, [("train-0", 1)])
    assert await leases.until_acknowledged(0.01)
    leases.cancel("runner-1", ("train-0", 1), "AGED_OUT")
    assert not await leases.until_acknowledged(0.01)
    leases.acknowledge(runner, [("train-0", 1)])
    assert await leases.until_acknowledged(0.01)
