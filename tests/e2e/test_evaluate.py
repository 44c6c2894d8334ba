"""`slipstream eval` on the weights that a run left, and on a run that is up."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
from run_process import left_of

pytestmark = pytest.mark.timeout(590, func_only=False)


def processes_in(directory) -> list[str]:
    """Command lines of processes with that directory on theirs, our own shells apart."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["pid"] != os.getpid() and any(str(directory) in word for word in words):
            found.append(" ".join(words))
    return found


def files_of(directory) -> dict[str, tuple[int, int]]:
    """Size and time of every file, by path."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def copied(finished, tmp_path_factory):
    """A copy of a finished run, elsewhere and under another name."""
    return Path(shutil.copytree(finished.bounded.path, tmp_path_factory.mktemp("elsewhere") / "copied"))


def test_a_copied_run_is_read_and_reported_where_it_is(finished, copied):
    before = files_of(finished.bounded.path)
    (copied / "report.html").unlink()
    for words in (("status",), ("rollouts", "--json"), ("report",), ("trace",), ("plot",)):
        done = finished.bounded.slipstream(words[0], str(copied), *words[1:])
        assert done.returncode == 0, (words, done.stderr)
        assert str(finished.bounded.path) not in done.stdout, words
    assert {"report.html", "trace.json"} <= {path.name for path in copied.iterdir()}
    assert files_of(finished.bounded.path) == before


def test_weights_are_evaluated_by_engines_that_come_and_go(finished, copied):
    run, original = finished.bounded, files_of(finished.bounded.path.parent)
    arguments = ("eval", str(copied), "--samples", "2", "--problems", "3", "--json")
    done = run.slipstream(*arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["of"] == str(copied / "checkpoints" / "final")
    letters = result["environments"]["letters"]
    assert (letters["problems"], letters["samples"], letters["unanswered"]) == (3, 2, 0)
    assert letters["versions"] == ["1.0"]
    assert 0 < letters["reward_mean"] < 1
    evaluated = copied.with_name("bounded-eval")
    assert files_of(run.path.parent) == original, "beside the copy, not beside the original"
    assert json.loads((evaluated / "evaluation.json").read_text()) == result
    assert "trainer" not in (evaluated / "endpoints.toml").read_text()
    assert left_of(lambda: processes_in(evaluated)) == [], "children of children end by themselves, a moment later"


def test_a_run_that_is_up_is_evaluated_and_goes_on(launch):
    run = launch("run", "--orchestrator.total-steps", "10000")
    run.wait_step(1)
    done = run.slipstream("eval", "run", "--problems", "2", "--samples", "2", "--parallel", "1")
    assert done.returncode == 0, done.stderr
    assert "letters" in done.stdout
    steps = len(run.metrics("step"))
    run.wait_until(lambda: len(run.metrics("step")) > steps)
    result = json.loads((run.path / "evaluations" / "1" / "evaluation.json").read_text())
    assert result["environments"]["letters"]["problems"] == 2
    assert run.slipstream("stop", "run").returncode == 0
    asked = [rollout for rollout in run.rollouts() if rollout["split"] == "held_out"]
    assert {rollout["purpose"] for rollout in asked} == {"external"}
    assert len(asked) == 4
