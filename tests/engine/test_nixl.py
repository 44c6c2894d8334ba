"""Weights over NIXL, between two processes: none of them is this one, from which engines are forked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 2


@pytest.mark.timeout(110)
def test_versions_are_read_over_nixl_and_their_sums_are_the_manifests(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    command = [sys.executable, "loadtests/weight_transports.py", "--device", "cpu", "--gigabytes", "0.02"]
    command += ["--updates", str(UPDATES), "--transports", "nixl", "--limit-s", "90", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    of_nixl = [each for each in found if each.get("transport") == "nixl"]
    assert of_nixl, ended.stdout + ended.stderr
    assert not [each for each in of_nixl if "error" in each], of_nixl
    assert of_nixl[-1]["updates"] == UPDATES
