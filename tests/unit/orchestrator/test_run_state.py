"""What others see of a run."""

from __future__ import annotations

import time
from pathlib import Path

from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.run_state import RunPhase, RunState


def test_the_first_wait_counts_from_the_begin_of_training(tmp_path: Path):
    state = RunState("watched", 10, MetricsFile(tmp_path / "metrics.jsonl", time.time))
    now_s = time.time()
    assert state.wait_in_training_s(60.0, now_s) == 60.0
    state.enter(RunPhase.TRAINING)
    began_s = time.time()
    assert 2.9 < state.wait_in_training_s(60.0, began_s + 3.0) < 3.1
    assert state.wait_in_training_s(0.5, began_s + 3.0) == 0.5
    assert state.wait_in_training_s(60.0, began_s - 3.0) == 0.0
