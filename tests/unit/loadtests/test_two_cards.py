"""What a run over two cards leaves behind while it goes on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from slipstream.environments.base import Completion, Task
from slipstream.environments.config import ImportedConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "loadtests"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_each_record_is_written_once_and_the_summary_leaves_the_first_step_out(tmp_path):
    from two_cards import Watched

    records = [{"kind": "phase", "phase": "training", "time_s": 10.0}]
    records += [
        {"kind": "step", "step": n, "time_s": 20.0 + n, "loss_tokens": 100 * n, "lag_mean": 1.0, "lag_max": n,
         "published_bytes": 8.0, "train_s": float(n)}
        for n in (1, 2, 3)
    ]  # fmt: skip
    update = {"kind": "update", "version": "1.1", "time_s": 22.0, "pause_s": 0.5, "in_flight_samples": 7}
    watched = Watched(tmp_path, tmp_path / "out.jsonl")
    for count in (0, 1, 3, 4):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*records, update][:count]))
        watched.look()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(update) + "\n")
    watched.look()
    assert [line["kind"] for line in lines_of(tmp_path / "out.jsonl")] == ["up", "step", "step", "step", "update"]
    summary = watched.summary("exit code 0")
    assert summary["trained_tokens_per_s"] == 250.0
    assert summary["train_s"] == 2.5
    assert (summary["steps"], summary["lag_max"], summary["in_flight_max"]) == (3, 3, 7)


def test_runs_are_compared_with_the_first_of_them(tmp_path):
    from two_cards import Watched, comparison

    found = {}
    for bound, seconds in ((0, 4.0), (4, 1.0)):
        found[bound] = Watched(tmp_path, tmp_path / "out.jsonl")
        found[bound].steps = [
            {"step": n, "time_s": seconds * n, "loss_tokens": 8, "lag_max": 0, "published_bytes": 1.0} for n in range(3)
        ]
    assert comparison(found) == {
        "trained_tokens_per_s": {0: 2.0, 4: 8.0},
        "times_the_first": {0: 1.0, 4: 4.0},
    }
    found[0].steps = []
    assert comparison(found)["times_the_first"] == {}, "nothing to compare with"


async def test_noise_tells_the_members_of_a_group_apart_and_is_the_same_each_time():
    noise = importlib.import_module("noise").Noise
    config = ImportedConfig(name="noise", path="noise:Noise", options={"prompt_characters": 9})
    task, answers = Task("train", 3), [Completion("", stopped=False)] * 4
    first, second = noise(config, 1), noise(config, 1)
    assert first.prompt(task) == second.prompt(task)
    assert len(first.prompt(task)) == 9
    scores = [await each.score(task, answers, None) for each in (first, second)]
    assert scores[0] == scores[1]
    assert len({score.reward for score in scores[0]}) == 4
