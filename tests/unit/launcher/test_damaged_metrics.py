"""A damaged `metrics.jsonl` is one line for whoever asks for a report or a plot, never a traceback."""

from __future__ import annotations

import json

import pytest

from slipstream.launcher.cli import main
from slipstream.launcher.metrics_records import read_metrics

DAMAGED = {
    "no number": ({"kind": "step", "time_s": 1.0, "loss": 0.5}, "a record of kind step without step"),
    "text for a number": ({"kind": "step", "time_s": 1.0, "step": 3, "lag_max": "two"}, 'lag_max is "two"'),
    "a list": ({"kind": "update", "time_s": 1.0, "pause_s": [1]}, "pause_s is [1]"),
    "a text by name": ({"kind": "step", "time_s": 1.0, "step": 3, "reward_by_environment": {"a": "b"}}, "reward_by_"),
    "a lag that is none": ({"kind": "step", "time_s": 1.0, "step": 3, "lag_counts": {"x": 1}}, "lag_counts"),
    "number for a text": ({"kind": "run", "time_s": 1.0, "state": 3}, "state is 3"),
    "more than a float": ({"kind": "step", "time_s": 1.0, "step": 3, "loss": 10**400}, "loss is 1000"),
    "a table for a number": (
        {"kind": "evaluation", "name": "e", "environment": "w", "step": 3, "accuracy": {}, "count": 3},
        "accuracy is {}",
    ),
    "a number for a table": ({"kind": "step", "time_s": 1.0, "step": 3, "reward_by_role": 0.5}, "reward_by_role is 0"),
    "no pass@k": (
        {
            "kind": "evaluation",
            "name": "e",
            "environment": "w",
            "step": 3,
            "accuracy": 1.0,
            "count": 3,
            "pass_at_k": None,
        },
        "pass_at_k is null",
    ),
    "no kind": ({"time_s": 1.0}, "it has no kind"),
    "not finite": ({"kind": "step", "time_s": float("nan"), "step": 3}, "time_s is NaN"),
}


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize("fault", DAMAGED)
def test_a_record_that_no_service_writes_is_named_by_its_line(synthetic_run, capsys, command, fault):
    record, sentence = DAMAGED[fault]
    path = synthetic_run.path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:7], json.dumps(record), *lines[7:]]) + "\n")
    with pytest.raises(SystemExit) as ended:
        main([command, str(synthetic_run.path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}, line 8, is damaged: ")
    assert sentence in line


@pytest.mark.parametrize("command", ["report", "plot"])
def test_a_directory_in_its_place_is_one_line_too(synthetic_run, capsys, command):
    path = synthetic_run.path / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(SystemExit) as ended:
        main([command, str(synthetic_run.path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {path} cannot be read: Is a directory\n"


def test_what_is_half_written_or_of_a_kind_that_is_not_known_yet_is_no_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    newer = {"kind": "something new", "figures": ["a"]}
    path.write_text(json.dumps(newer) + '\n{"kind": "step", "time_s": 1.0, "st')
    assert read_metrics(path) == [newer]
