"""A run whose prefill and decode workers are both vLLM, with NIXL between them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from run_process import PREFILLING, RunProcess, terminal_outcomes

pytestmark = pytest.mark.timeout(590, func_only=False)

STEPS = 3
POOLS = [
    f"--{pool}.engine.{words}"
    for pool in ("prefill", "decode")
    for words in ("type=vllm", "connector=nixl", "block-count=256")
]


def test_a_run_with_both_pools_on_vllm_trains_on_tokens_and_routes_from_both(launch: Callable[..., RunProcess]):
    run = launch(
        "pools",
        *PREFILLING,
        *POOLS,
        *("--orchestrator.total-steps", str(STEPS)),
        *("--orchestrator.stall-timeout-s", "300"),
    )
    assert run.end() == 0, run.output
    report = run.report()
    assert report["steps"] == STEPS
    assert report["pure_max_abs_diff"] < 1e-4
    assert report["routes_unknown_fraction"] == 0.0
    assert terminal_outcomes(run.journal()) == {1}
    for pool in ("prefill", "decode"):
        lines = (run.path / "timeline" / f"{pool}-1.jsonl").read_text().splitlines()
        assert any(json.loads(line)["kind"] == pool for line in lines), f"the {pool} pool did nothing"
    assert run.left_after() == []
