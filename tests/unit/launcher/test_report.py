"""The report, from run directories that no service has written."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slipstream.launcher.charts import BLUE, Series, line_chart
from slipstream.launcher.intervals import intersection, total_s, union
from slipstream.launcher.records import read_run
from slipstream.launcher.report import build_report, write_report
from slipstream.launcher.rundir import RunDir

PROMISED = [
    "seed", "accuracy_before", "accuracy_after", "accuracy_by_environment", "wall_s", "steps", "lag_max", "lag_bound",
    "overlap_fraction", "mismatch_kl", "cached_token_fraction", "versions_applied", "rollouts_cancelled",
    "sandbox_executions",
]  # fmt: skip


def test_the_report_has_every_promised_figure(synthetic_run):
    write_report(synthetic_run)
    report = json.loads((synthetic_run.path / "report.json").read_text())
    assert not [key for key in PROMISED if report.get(key) is None]
    assert report["seed"] == 3
    assert (report["accuracy_before"], report["accuracy_after"]) == pytest.approx(
        ((0.41 + 0.18) / 2, (0.955 + 0.61) / 2)
    )
    assert report["accuracy_by_environment"]["make_number"] == {"before": 0.18, "after": 0.61, "count": 200}
    assert report["steps"] == 20
    assert (report["lag_max"], report["lag_bound"]) == (2, 2)
    assert report["wall_s"] == 90
    assert report["versions_applied"] == 60
    assert report["rollouts_cancelled_by_reason"] == {"AGED_OUT": 40, "RUN_ENDING": 8}
    assert report["cached_token_fraction"] == 0.75
    assert report["sandbox_executions"] == 7680


def test_a_resumed_run_began_with_its_first_launcher_and_took_the_time_of_all(synthetic_run):
    events = synthetic_run.path / "launcher.jsonl"
    before = build_report(read_run(synthetic_run))["wall_s"]
    ended_s = read_run(synthetic_run).ended_s
    began_s = read_run(synthetic_run).begun_s
    assert began_s is not None
    assert ended_s is not None
    later = [{"kind": "run_started", "time_s": ended_s + 1000}, {"kind": "run_ended", "time_s": ended_s + 1030}]
    events.write_text(events.read_text() + "".join(json.dumps(event) + "\n" for event in later))
    write_report(synthetic_run)
    assert json.loads((synthetic_run.path / "report.json").read_text())["wall_s"] == before + 30
    assert read_run(synthetic_run).begun_s == began_s
    page = (synthetic_run.path / "report.html").read_text()
    title = re.search(r"(-?\d+) seconds in the middle of training", page)
    assert title
    assert int(title[1]) > 0


def test_a_report_says_when_the_run_started_and_the_whole_of_why_it_ended(synthetic_run):
    events = synthetic_run.path / "launcher.jsonl"
    why = "a <long> reason; " * 40
    later = [
        {"kind": "run_started", "time_s": 1_900_000_000},
        {"kind": "run_ended", "time_s": 1_900_000_030, "exit_code": 1, "reason": why},
    ]
    events.write_text("".join(json.dumps(event) + "\n" for event in later))
    write_report(synthetic_run)
    assert json.loads((synthetic_run.path / "report.json").read_text())["reason"] == why
    page = (synthetic_run.path / "report.html").read_text()
    assert "started 17 March 2030, 17:46 UTC" in page
    assert why.replace("<", "&lt;").replace(">", "&gt;") in page


def test_accuracy_weighs_each_problem_alike_and_waits_for_every_environment(tmp_path, write_lines):
    asked = [("before", "a", 0.5, 300), ("before", "b", 0.1, 100), ("after", "a", 1.0, 300)]
    write_lines(tmp_path / "metrics.jsonl", [
        {"kind": "evaluation", "name": name, "step": 0, "environment": of, "accuracy": accuracy, "count": count}
        for name, of, accuracy, count in asked
    ])  # fmt: skip
    report = build_report(read_run(RunDir(tmp_path)))
    assert report["accuracy_before"] == pytest.approx(0.4)
    assert report["accuracy_after"] is None
    assert report["accuracy_by_environment"]["a"] == {"before": 0.5, "after": 1.0, "count": 300}


def test_every_figure_is_in_the_operations_guide_and_nothing_else(synthetic_run):
    guide = Path(__file__).parents[3] / "docs" / "operations.md"
    table = guide.read_text().partition("## What `report.json` holds")[2].partition("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(build_report(read_run(synthetic_run)))


def test_success_rates_that_choose_tasks_are_drawn_by_part(tmp_path, write_lines):
    write_lines(tmp_path / "metrics.jsonl", [
        {"kind": "step", "time_s": float(step), "step": step, "success_rate_by_environment": {"sums": 0.4},
         "success_rate_by_part": {"sums/0": 0.6, "sums/1": 0.2}}
        for step in (1, 2)
    ])  # fmt: skip
    write_report(RunDir(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "Success rates that choose tasks" in page
    assert "sums/1" in page
    assert json.loads((tmp_path / "report.json").read_text())["success_rate_by_environment"] == {"sums": 0.4}


def test_rewards_by_role_are_drawn(tmp_path, write_lines):
    write_lines(tmp_path / "metrics.jsonl", [
        {"kind": "step", "time_s": float(step), "step": step, "reward_by_role": {"duel/white": 0.6, "duel/black": -0.6}}
        for step in (1, 2)
    ])  # fmt: skip
    write_report(RunDir(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "Reward by role" in page
    assert "duel/black" in page
    assert json.loads((tmp_path / "report.json").read_text())["reward_by_role"] == {
        "duel/white": 0.6,
        "duel/black": -0.6,
    }


def test_the_kl_to_a_teacher_is_a_figure_and_a_chart_where_there_is_one(tmp_path, synthetic_run, write_lines):
    write_lines(tmp_path / "metrics.jsonl", [
        {"kind": "step", "time_s": 1.0, "step": 1, "teacher_kl": 0.5, "loss_tokens": 10},
        {"kind": "step", "time_s": 2.0, "step": 2, "teacher_kl": 0.2, "loss_tokens": 20},
    ])  # fmt: skip
    write_report(RunDir(tmp_path))
    assert "KL to the teacher" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["teacher_kl"] == pytest.approx(0.3)
    write_report(synthetic_run)
    assert "teacher" not in (synthetic_run.path / "report.html").read_text()
    assert json.loads((synthetic_run.path / "report.json").read_text())["teacher_kl"] is None


def test_overlap_is_training_time_with_any_decode_over_training_time(synthetic_run):
    # Training runs from 0.0 to 0.6 of each step, both decode workers from 0.1 to 0.9.
    assert build_report(read_run(synthetic_run))["overlap_fraction"] == pytest.approx(5 / 6, abs=1e-3)


def test_files_that_reached_their_bound_are_read_with_what_is_left_of_them(synthetic_run):
    whole = build_report(read_run(synthetic_run))
    for name in ("metrics.jsonl", "timeline/decode-1.jsonl", "timeline/decode-2.jsonl"):
        path = synthetic_run.path / name
        lines = path.read_text().splitlines(keepends=True)
        path.with_name(f"{path.name}.1").write_text("".join(lines[: len(lines) // 2]))
        path.write_text("".join(lines[len(lines) // 2 :]))
    assert build_report(read_run(synthetic_run)) == whole

    for path in (synthetic_run.path / "timeline").glob("decode-*.jsonl.1"):
        path.write_text(path.read_text().splitlines(keepends=True)[-1])  # the rest went
    assert build_report(read_run(synthetic_run))["overlap_fraction"] == pytest.approx(5 / 6, abs=0.03)


def test_intervals_unite_and_intersect():
    left = union([(3, 5), (0, 1), (0.5, 2), (7, 7)])
    assert left == [(0, 2), (3, 5)]
    assert intersection(left, [(1, 4)]) == [(1, 2), (3, 4)]
    assert total_s(left) == 4


def test_mismatch_is_a_mean_over_trained_tokens(tmp_path, write_lines):
    steps = [{"kind": "step", "step": n, "time_s": n, "tokens": t, "mismatch_kl": kl}
             for n, t, kl in ((1, 100, 0.1), (2, 300, 0.5))]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", steps)
    assert build_report(read_run(RunDir(tmp_path)))["mismatch_kl"] == pytest.approx(0.4)


def test_the_mismatch_stands_with_replay_on_beside_replay_off_for_each_kind_of_token(synthetic_run):
    report = build_report(read_run(synthetic_run))
    assert report["replay_check_tokens"] == 4000
    assert report["mismatch_share"] == {"numeric": 0.25, "policy_lag": 0.5, "stale_kv": 0.25}
    on, off = report["mismatch_replay_on"], report["mismatch_replay_off"]
    assert on == pytest.approx({"all": 3e-3 + 1e-11, "numeric": 4e-11, "policy_lag": 4e-3, "stale_kv": 4e-3})
    assert off == pytest.approx({"all": 8e-3, "numeric": 4e-3, "policy_lag": 8e-3, "stale_kv": 0.012})
    page = write_report(synthetic_run).read_text()
    assert "<tr><td>numeric (pure context)</td><td>25 %</td><td>4.0e-11</td><td>0.004</td></tr>" in page


def test_a_run_that_never_checked_replay_has_no_table_of_it(tmp_path, write_lines):
    write_lines(tmp_path / "metrics.jsonl", [{"kind": "step", "step": 1, "time_s": 1, "tokens": 5, "mismatch_kl": 0.1}])
    report = build_report(read_run(RunDir(tmp_path)))
    assert (report["replay_check_tokens"], report["mismatch_replay_on"], report["mismatch_share"]) == (0, None, None)
    assert "routing replay" not in write_report(RunDir(tmp_path)).read_text()


class TagCheck(HTMLParser):
    """Counts open tags and collects what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(synthetic_run):
    page = write_report(synthetic_run).read_text()
    check = TagCheck()
    check.feed(page)
    assert check.open == []
    assert check.loaded == []
    assert "<script" not in page
    assert "nan" not in re.findall(r'points="[^"]*"', page)
    for text in ("Lag of trained groups", "aged out", "stale KV", "decode-2", "tenalp", "policy lag"):
        assert text in page


def test_the_page_says_what_its_figures_are(synthetic_run):
    page = write_report(synthetic_run).read_text()
    for text in (
        "trained tokens/s",
        "All that the decode workers drew, trained or not",
        "Filtered: all rollouts of the group earned the same",
        "of the 10 held-out problems, the first by number: 6 wrong before and 2 right before. Not a random sample",
        "what lies between was not measured",
    ):
        assert text in page, text


def test_the_page_shows_where_training_time_goes_and_how_experts_are_used(tmp_path, write_lines):
    steps = [
        {"kind": "step", "step": n, "time_s": n, "forward_s": 0.2, "backward_s": 0.5, "frozen_s": 1e-5, "mfu": 0.31,
         "expert_load_max": 0.9, "expert_load_mean": 0.4} for n in range(1, 20)
    ]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", steps)
    page = write_report(RunDir(tmp_path)).read_text()
    for text in ("Within a training step", "backward", "Utilisation of the trainer", "Load of experts", "worst layer"):
        assert text in page, text
    assert "reference and teacher" not in page
    write_lines(tmp_path / "metrics.jsonl", [{"kind": "step", "step": 1, "time_s": 1.0, "loss": 0.1}])
    page = write_report(RunDir(tmp_path)).read_text()
    assert "Within a training step" not in page
    assert "Load of experts" not in page


def test_two_evaluations_are_dots_with_their_values_and_no_line():
    ends = Series("spell", [(0, 0.45), (80, 0.97)], BLUE, marked=True, joined=False)
    chart = line_chart(
        [ends], x_label="step", y_label="accuracy", y_range=(0, 1), y_format=lambda y: f"{100 * y:.0f} %"
    )
    assert "<polyline" not in chart
    assert chart.count("<circle") == 2
    assert ">45 %</text>" in chart
    assert ">97 %</text>" in chart


def test_the_axis_of_the_mismatch_ends_where_rounding_begins(tmp_path, write_lines):
    steps = [{"kind": "step", "step": n, "time_s": n, "mismatch_kl": 1e-3, "mismatch_numeric": value}
             for n, value in ((1, 3e-17), (2, 0.0), (3, 2e-11))]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", steps)
    page = write_report(RunDir(tmp_path)).read_text()
    assert ">1e-12</text>" in page
    assert ">1e-13</text>" not in page
    assert ">1e-17</text>" not in page


def test_what_the_model_wrote_is_escaped(synthetic_run, write_rollouts):
    write_rollouts(synthetic_run.path / "rollouts" / "runner-1.evaluation.jsonl.zst", [
        {"purpose": "evaluation", "environment": "spell_backward", "task_index": 1, "dispatch_version": "1.0",
         "prompt": "<script>alert(1)</script>", "completion": "</code>", "correct": False}
    ])  # fmt: skip
    page = write_report(synthetic_run).read_text()
    assert "<script" not in page
    assert "&lt;/code&gt;" in page


def test_a_run_that_wrote_nothing_still_reports(tmp_path):
    assert write_report(RunDir(tmp_path)).exists()
    assert json.loads((tmp_path / "report.json").read_text())["accuracy_before"] is None


def test_a_half_written_line_is_left_out(synthetic_run):
    with (synthetic_run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "step", "st')
    assert build_report(read_run(synthetic_run))["steps"] == 20
