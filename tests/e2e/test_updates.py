"""A run samples on while its weights change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from run_process import RunProcess, steps_of

pytestmark = pytest.mark.timeout(590, func_only=False)


def test_updates_meet_samples_in_flight_which_go_on(launch: Callable[..., RunProcess]) -> None:
    """Whether one does is a matter of moments, so the run takes as many steps as are needed."""
    run = launch("run", "--orchestrator.total-steps", "100000", "--orchestrator.samples-per-group", "8")
    run.wait_until(lambda: any(record["in_flight_samples"] for record in run.metrics("update")))
    run.wait_until(lambda: any(len(set(steps_of(rollout))) > 1 for rollout in run.rollouts()))
