"""SmolLM2's loop on a card: a run that is cut off has left what there was of it."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest
import smollm2


def test_a_run_that_is_cut_off_leaves_figures_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "KEEP_INTERVAL_S", 0.1)
    out, work = tmp_path / "out", tmp_path / "work"
    logs = work / "runs" / smollm2.RUN / "logs"
    out.mkdir()
    logs.mkdir(parents=True)
    (logs / "trainer.log").write_text("began\n")
    steps = [{"kind": "step", "step": number, "reward_mean": 0.5, "time_s": 1.0} for number in (1, 2)]
    (logs.parent / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    stages = smollm2.Stages(out, work, 0.5)
    assert stages.run("rl", [sys.executable, "-c", "import time; time.sleep(60)"]) == 124
    notes = [json.loads(line) for line in (out / "smollm2.jsonl").read_text().splitlines()]
    assert notes[0]["step"] == 2  # noted while it ran
    assert notes[-1]["exit"] == 124
    assert (out / "metrics.jsonl").read_text() == (logs.parent / "metrics.jsonl").read_text()
    with tarfile.open(out / "logs.tar.gz") as kept:
        assert {f"{smollm2.RUN}-logs/trainer.log", "work-logs/rl.log"} <= set(kept.getnames())
    assert not list(out.glob("*.part"))
