from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.launcher.cli import main
from slipstream.launcher.plot import WIDTH, collect
from slipstream.launcher.records import read_json_lines

RECORDED = Path(__file__).with_name("recorded_metrics.jsonl")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory that holds the recorded metrics; commands are typed beside it."""
    path = tmp_path / "runs" / "recorded"
    path.mkdir(parents=True)
    (path / "config.toml").write_text("")
    (path / "metrics.jsonl").write_text(RECORDED.read_text())
    monkeypatch.chdir(tmp_path)
    return path


def plot(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plot", *arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_the_overview_fits_a_terminal_and_has_no_colours_in_a_pipe(run, capsys):
    code, out, _ = plot(capsys)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "recorded: 25 steps"
    assert max(map(len, lines)) <= WIDTH
    assert "\x1b" not in out
    for title in (
        "reward by environment",
        "accuracy",
        "lag of trained",
        "tokens sampled",
        "mismatch",
        "a step's phases",
    ):
        assert any(line.startswith(title) for line in lines), title
    assert "expression" in out
    assert "spell_backward" in out


def test_what_takes_ascii_alone_is_shown_something_too(run):
    command = [sys.executable, "-m", "slipstream.launcher", "plot", "--metric", "lag"]
    shown = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False, timeout=60
    )
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"lag of trained groups" in shown.stdout


def test_a_rising_line_rises(run, capsys):
    steps = [{"kind": "step", "step": step, "loss": float(step)} for step in range(1, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    _, out, _ = plot(capsys, "recorded", "--metric", "loss")
    rows = [line.partition("│")[2] for line in out.splitlines() if "│" in line]
    columns = [row.index("•") for row in rows]
    assert columns == sorted(columns, reverse=True)
    assert len(rows) == 9
    assert out.splitlines()[-1].split() == ["1", "step", "9"]


def test_a_metric_by_name_is_drawn_alone_also_from_a_path(run, capsys):
    code, out, _ = plot(capsys, str(run), "--metric=grad_norm")
    assert code == 0
    assert "grad_norm" in out
    assert "reward" not in out


def test_metrics_are_listed_and_each_of_them_can_be_drawn(run, capsys):
    code, out, _ = plot(capsys, "--metric", "list")
    names = out.split()
    assert code == 0
    assert {"reward", "curriculum", "grad_norm", "loss"} <= set(names)
    assert plot(capsys, *(word for name in names for word in ("--metric", name)))[0] == 0
    assert "--metric list" in plot(capsys, "--help")[1]


def test_an_unknown_metric_or_run_gets_one_line_with_what_was_meant(run, capsys):
    assert plot(capsys, "--metric", "gradnorm")[::2] == (
        2,
        "error: no metric called 'gradnorm'; did you mean 'grad_norm'?\n",
    )
    code, _, error = plot(capsys, "nowhere")
    assert (code, error.count("\n")) == (2, 1)
    assert "nowhere" in error
    code, _, error = plot(capsys, "--metrics", "loss")
    assert (code, error.count("\n")) == (2, 1)


def test_a_run_that_has_just_begun_or_is_writing_is_no_error(run, capsys):
    (run / "metrics.jsonl").unlink()
    assert plot(capsys, "--metric", "loss") == (0, "recorded: 0 steps, nothing to draw yet\n", "")
    (run / "metrics.jsonl").write_text('{"kind":"step","step":1,"loss":0.5}\n{"kind":"step","st')
    code, out, _ = plot(capsys)
    assert (code, out.splitlines()[0]) == (0, "recorded: 1 steps, nothing to draw yet")
    assert "loss 0.5" in plot(capsys, "--metric", "loss")[1]


def test_a_run_that_has_ended_without_a_metric_is_not_waited_for(run, capsys):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind":"run","state":"finished"}\n')
    said = "recorded: 25 steps, nothing to draw: the run recorded no roles\n"
    assert plot(capsys, "--metric", "roles") == (0, said, "")


def test_the_kl_to_a_teacher_is_drawn_unless_told(run, capsys):
    assert "teacher" not in plot(capsys)[1]
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind":"step","step":26,"teacher_kl":0.25}\n')
    assert "KL to the teacher, nats a token  • teacher_kl 0.25" in plot(capsys)[1]


@pytest.fixture
def other(run) -> Path:
    """A second run, longer than the recorded one and without its curriculum."""
    path = run.parent / "longer"
    path.mkdir()
    (path / "config.toml").write_text("")
    steps = [
        {"kind": "step", "step": step, "loss": 9.0 - step / 5, "reward_by_environment": {"spell_backward": 0.5}}
        for step in range(1, 41)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    return path


def test_runs_are_lines_of_one_chart_with_their_names(run, other, capsys):
    code, out, _ = plot(capsys, "recorded", "longer", "--metric", "loss", "--metric", "reward")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == ["recorded: 25 steps", "longer: 40 steps"]
    legends = [line for line in lines if "• recorded" in line or "x longer" in line]
    assert legends[0].startswith("loss  • recorded ")
    assert legends[0].endswith("  x longer 1")
    assert any(line.startswith("spell_backward: reward by environment") for line in lines), "a chart for each line"
    assert any(line.startswith("expression: reward by environment") for line in lines)
    rows = [line.partition("│")[2] for line in lines if "│" in line][:9]
    ends = {mark: max(row.rindex(mark) for row in rows if mark in row) for mark in "•x"}
    assert ends["•"] == round((25 - 1) / (40 - 1) * ends["x"]), "steps are those of one axis"
    assert max(map(len, lines)) <= WIDTH


def test_the_overview_of_several_runs_is_what_is_compared(run, other, capsys):
    _, out, _ = plot(capsys, str(run), str(other))
    assert "accuracy on held-out problems  • recorded" in out
    assert "tokens sampled a second  • recorded" in out
    assert "phases" not in out
    names = plot(capsys, "recorded", "longer", "--metric", "list")[1].split()
    assert names == plot(capsys, "recorded", "--metric", "list")[1].split()
    assert plot(capsys, "longer", "recorded", "--metric", "gradnorm")[2].endswith("did you mean 'grad_norm'?\n")
    nothing = "recorded: 25 steps\nlonger: 40 steps, nothing to draw yet\n"
    assert plot(capsys, "recorded", "longer", "--metric", "roles")[1] == nothing


def test_runs_of_one_name_are_told_apart_by_their_paths(run, capsys, tmp_path):
    copy = tmp_path / "copies" / "recorded"
    shutil.copytree(run, copy)
    _, out, _ = plot(capsys, "recorded", str(copy), "--metric", "grad_norm")
    assert "grad_norm  • runs/recorded 0.418  x copies/recorded 0.418" in out
    code, _, error = plot(capsys, *["recorded"] * 9)
    assert (code, error) == (2, "error: 9 runs: one chart takes 8 at most\n")


def test_following_a_run_that_has_ended_shows_it_and_ends(run, capsys):
    code, out, _ = plot(capsys, "--follow")
    assert code == 0
    assert out.count("recorded: 25 steps") == 1


def test_a_step_trained_again_counts_once_and_its_last_record_stands():
    records = [{"kind": "step", "step": 1, "loss": 1.0}, {"kind": "step", "step": 1, "loss": 2.0}]
    assert collect(records)["loss"] == {"loss": [(1, 2.0)]}
    assert set(collect(read_json_lines(RECORDED))["reward_by_environment"]) == {"spell_backward", "expression"}
