"""Checkpoints by other numbers of ranks, Muon on sharded matrices, and writers killed at random moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank_jobs.py saw; it imports torch once for all."""
    done = subprocess.run(
        [sys.executable, str(HERE / "rank_jobs.py"), str(tmp_path_factory.mktemp("ranks"))],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks_and_training_goes_on_the_same(seen, algorithm):
    worst = seen["resharded"][algorithm]
    assert worst["1 to 1"] == 0.0
    assert worst.keys() == {"1 to 1", "1 to 2", "2 to 1"}
    assert max(worst.values()) < 1e-6, worst  # Muon gathers whole matrices, so it rounds as one process does


def test_twenty_kills_at_random_moments_leave_a_whole_checkpoint_each_time(seen):
    assert seen["killed"]["kills"] == 20
    assert seen["killed"]["in_the_middle"] >= 10, "every second kill hits a writer at work"
