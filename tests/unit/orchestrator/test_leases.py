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
    silent, _ = leases.renew("runner-1", "a")
    heard, _ = leases.renew("runner-2", "a")
    leases.grant(silent, [("train-0", 1)])
    leases.grant(heard, [("train-1", 1)])
    clock.now = 8.0
    leases.renew("runner-2", "a")
    clock.now = 12.0
    assert [(runner.runner_id, lost) for runner, lost in leases.expire()] == [("runner-1", [("train-0", 1)])]
    assert leases.runners == [heard]


def test_a_later_epoch_takes_over_and_the_earlier_one_is_told() -> None:
    leases = RunnerLeases(10.0, Clock())
    first, _ = leases.renew("runner-1", "1")
    leases.grant(first, [("train-0", 1)])
    _, lost = leases.renew("runner-1", "2")
    assert lost == [("train-0", 1)]
    with pytest.raises(RunnerSuperseded):
        leases.renew("runner-1", "1")


async def test_an_update_waits_for_acknowledgements_and_not_longer_than_told() -> None:
    leases = RunnerLeases(10.0, Clock())
    runner, _ = leases.renew("runner-1", "1")
    leases.grant(runner, [("train-0", 1)])
    assert await leases.until_acknowledged(0.01)
    leases.cancel("runner-1", ("train-0", 1), "AGED_OUT")
    assert not await leases.until_acknowledged(0.01)
    leases.acknowledge(runner, [("train-0", 1)])
    assert await leases.until_acknowledged(0.01)
