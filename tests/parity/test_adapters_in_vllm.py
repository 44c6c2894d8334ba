"""Exported adapters in vLLM: served from a dense model; of experts, loaded, as its kernel for them needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "vllm_adapters.py"
TOLERANCE = 1e-4

pytestmark = pytest.mark.timeout(500)


def asked(what: str, directory: Path) -> dict[str, float]:
    assert find_spec("vllm") is not None, "vLLM is not installed: make install-vllm"
    path = os.pathsep.join([*filter(None, sys.path), str(SCRIPT.parent)])
    done = subprocess.run(
        [sys.executable, SCRIPT, what, directory],
        capture_output=True,
        text=True,
        timeout=450,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_serves_an_adapter_as_the_trainer_computes_it_and_its_base_beside(tmp_path):
    differences = asked("served", tmp_path)
    assert differences.keys() == {"adapter", "base"}
    assert all(difference < TOLERANCE for difference in differences.values()), differences


def test_vllm_stacks_the_adapters_of_experts_for_its_kernel(tmp_path):
    differences = asked("loaded", tmp_path)
    assert differences.keys() == {"gate_proj", "up_proj", "down_proj"}
    assert all(difference < 1e-6 for difference in differences.values()), differences
