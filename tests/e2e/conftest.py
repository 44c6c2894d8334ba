"""Runs of all services, and two that have finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rollout_traces import TRACED
from run_process import PREFILLING, RunProcess, launch, launching

__all__ = ["launch"]

EVALUATED = ("--evaluation.before", "true", "--evaluation.after", "true")


@dataclass(frozen=True)
class FinishedRuns:
    """Two runs that went on side by side in one directory."""

    bounded: RunProcess
    """Asynchronous: a lag of two steps at most."""
    synchronous: RunProcess
    """A bound of 0, no prefill pool, and two ranks of the trainer."""
    exit_codes: list[int]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRuns]:
    with launching(tmp_path_factory.mktemp("pair")) as start:
        pools = (*PREFILLING, "--decode.replicas", "2")
        bounded = start("bounded", *pools, "--orchestrator.total-steps", "8", *EVALUATED, *TRACED)
        ranks = ("--trainer.nproc", "2")
        synchronous = start("synchronous", "--orchestrator.max-off-policy-steps", "0", *ranks)
        for run in (bounded, synchronous):
            run.wait_up()
        yield FinishedRuns(bounded, synchronous, [run.end() for run in (bounded, synchronous)])
