"""A run goes on through kills of its services, and what it trains is what it would have trained without."""

from __future__ import annotations

from pathlib import Path

import chaos
import pytest

pytestmark = pytest.mark.timeout(590, func_only=False)

KILLS = 8
STEPS = 16


def test_a_run_whose_services_are_killed_trains_every_position_once(tmp_path: Path) -> None:
    shape = chaos.Shape(runners=2)
    outcome = chaos.live(tmp_path, "killed", STEPS, lambda run: run.kill_by_progress(KILLS), seed=3, shape=shape)
    assert len(outcome.kills) == KILLS
    assert outcome.trained.keys() == set(range(STEPS * chaos.GROUPS_PER_STEP))
