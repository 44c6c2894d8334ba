"""What the progress display says."""

from __future__ import annotations

import pytest
from rich.console import Console

from slipstream.api.run.v1 import run_pb2
from slipstream.launcher.display import LEGEND, LineDisplay, PanelDisplay
from slipstream.launcher.progress import TimeLeft, duration, facts, outcome
from slipstream.launcher.sentences import LIMIT_CHARACTERS, one_line


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_time_left_is_the_rest_of_training_and_another_evaluation():
    clock = Clock()
    left = TimeLeft(clock)
    assert left.update(run_pb2.Run(phase="evaluating_before")) is None
    clock.now_s = 10
    assert left.update(run_pb2.Run(phase="training")) is None
    clock.now_s = 30
    assert left.update(run_pb2.Run(phase="training", phase_fraction_done=0.25)) == 60 + 10
    clock.now_s = 90
    assert left.update(run_pb2.Run(phase="evaluating_after")) is None
    clock.now_s = 95
    assert left.update(run_pb2.Run(phase="evaluating_after", phase_fraction_done=0.5)) == 5
    assert left.update(run_pb2.Run(phase="ended")) == 0


def test_training_shows_step_reward_lag_speed_and_time_left():
    metrics = {"reward_mean": 0.618, "lag_mean": 1.44, "tokens_per_s": 2310.4}
    run = run_pb2.Run(phase="training", step=31, total_steps=170, metrics=metrics)
    assert facts(run, 95.2) == [
        ("phase", "training"),
        ("step", "31/170"),
        ("reward", "0.62"),
        ("lag", "1.4"),
        ("tokens/s", "2310"),
        ("left", "1 min 35 s"),
    ]


def test_the_groups_that_are_ready_for_the_next_step_are_told():
    metrics = {"groups_ready": 9.0, "groups_per_step": 32.0}
    assert facts(run_pb2.Run(phase="training", total_steps=2, metrics=metrics), None)[2] == ("groups", "9 of 32")
    metrics["groups_ready"] = 40.0  # beyond the next one
    assert facts(run_pb2.Run(phase="training", total_steps=2, metrics=metrics), None)[2] == ("groups", "32 of 32")


def test_a_run_that_goes_on_does_not_take_what_was_done_before_for_its_own_speed():
    clock = Clock()
    left = TimeLeft(clock)
    assert left.update(run_pb2.Run(phase="training", phase_fraction_done=0.5)) is None
    clock.now_s = 10
    assert left.update(run_pb2.Run(phase="training", phase_fraction_done=0.6)) == pytest.approx(40)


def test_training_that_gets_nowhere_as_all_rewards_are_equal_says_so():
    run = run_pb2.Run(phase="training", step=0, total_steps=10, metrics={"groups_filtered_since_step": 12.0})
    assert ("filtered", "12 groups") in facts(run, None)
    run.metrics["groups_filtered_since_step"] = 0
    assert "filtered" not in dict(facts(run, None))


def test_the_warm_up_shows_what_moves():
    metrics = {"sft_step": 12.0, "sft_loss": 2.314, "sft_accuracy": 0.05}
    run = run_pb2.Run(phase="warm_up", phase_fraction_done=0.03, metrics=metrics)
    assert facts(run, None)[1:5] == [("step", "12"), ("loss", "2.31"), ("right", "5 %"), ("done", "3 %")]


def test_until_training_tells_more_the_time_left_is_said_to_be_unknown():
    assert facts(run_pb2.Run(phase="warm_up"), None)[-1] == ("left", "not known yet")
    for phase in ("evaluating_before", "training"):
        assert facts(run_pb2.Run(phase=phase), None)[-1] == ("left", "not known yet")


def test_a_long_reason_takes_one_line_that_says_where_all_of_it_is(capsys):
    reason = "Traceback\n  in a file\n" + "x" * 4000 + "; its log is logs/a.log"
    run = run_pb2.Run(phase="training", state=run_pb2.RUN_STATE_PAUSED, reason=reason, warnings=[reason + "!"])
    LineDisplay(Clock()).show(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Traceback" in line]
    assert len(lines) == 2
    assert max(map(len, lines)) < 400
    assert lines[0].endswith("x…; its log is logs/a.log (all of it: metrics.jsonl)")


def test_a_short_sentence_is_told_whole():
    assert one_line("decode-1 died; its log is here", "nowhere") == "decode-1 died; its log is here"
    assert len(one_line("x; " * 2000 + "y" * 300, "report.json")) < LIMIT_CHARACTERS + 40


def test_an_evaluation_within_training_is_told_with_its_step(capsys):
    result = run_pb2.Accuracy(evaluation="step-20", environment="spell", accuracy=0.5, problem_count=10)
    LineDisplay().show(run_pb2.Run(phase="training", step=21, total_steps=40, accuracies=[result]))
    assert "held-out accuracy at step 20: spell 50.0 % of 10" in capsys.readouterr().out


def test_a_figure_that_is_no_number_is_a_dash():
    run = run_pb2.Run(phase="training", metrics={"reward_mean": float("nan"), "tokens_per_s": 3.0})
    assert [value for name, value in facts(run, None) if name in ("reward", "tokens/s")] == ["–", "3"]


def test_a_paused_run_says_so():
    run = run_pb2.Run(phase="training", state=run_pb2.RUN_STATE_PAUSED)
    assert facts(run, None)[0] == ("phase", "training (paused)")


def test_the_outcome_names_accuracy_before_and_after():
    run = run_pb2.Run()
    for name, environment, accuracy in (("before", "spell", 0.41), ("after", "spell", 0.955), ("before", "make", 0.18)):
        run.accuracies.add(evaluation=name, environment=environment, accuracy=accuracy)
    assert outcome(run) == "spell 41.0 % -> 95.5 %, make 18.0 % -> not measured"


def test_figures_of_training_are_not_shown_in_a_later_phase():
    metrics = {"reward_mean": 0.618, "lag_mean": 1.44, "tokens_per_s": 2310.4}
    run = run_pb2.Run(phase="evaluating_after", phase_fraction_done=0.4, metrics=metrics)
    assert facts(run, 3.0) == [("phase", "evaluating after"), ("done", "40 %"), ("left", "3 s")]


def test_a_line_that_says_nothing_new_waits_a_minute(capsys):
    clock = Clock()
    display = LineDisplay(clock)
    run = run_pb2.Run(phase="training", step=3, total_steps=100)
    for clock.now_s in range(0, 120, 2):
        display.show(run)
    lines = [line.split("]")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["[    0 s", "[    0 s", "[    0 s", "[   60 s"]
    run.step = 4
    display.show(run)
    assert "step 4/100" in capsys.readouterr().out


def test_an_accuracy_is_told_once_when_it_is_there(capsys):
    display = LineDisplay(Clock())
    run = run_pb2.Run(phase="training", total_steps=9)
    for environment, accuracy in (("spell", 0.451), ("make", 0.07)):
        run.accuracies.add(evaluation="before", environment=environment, accuracy=accuracy, problem_count=200)
    display.show(run)
    display.show(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert lines == ["[    0 s] held-out accuracy before training: spell 45.1 % of 200, make 7.0 % of 200"]


def test_without_a_terminal_a_line_comes_now_and_then(capsys):
    display = LineDisplay()
    for step in range(100):
        display.show(run_pb2.Run(phase="training", step=step, total_steps=100))
    display.show(run_pb2.Run(phase="evaluating_after"))
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(said) for line, said in zip(lines, LEGEND, strict=False))
    assert max(map(len, lines)) <= 100
    assert len(lines) == 4
    assert "step 0/100" in lines[2]
    assert "evaluating after" in lines[3]


def test_once_all_services_are_up_starting_is_not_told_again(capsys):
    display = LineDisplay()
    display.show(run_pb2.Run(phase="starting"))
    display.show(run_pb2.Run(phase="warm_up", phase_fraction_done=0.1))
    (line,) = capsys.readouterr().out.splitlines()
    assert "supervised warm-up  done 10 %" in line


def test_the_panel_names_every_figure_above_its_value(capsys):
    console = Console(width=90, force_terminal=True, color_system=None)
    display = PanelDisplay(console)
    metrics = {"reward_mean": 0.618, "lag_mean": 1.44, "tokens_per_s": 2310.4}
    display.show(run_pb2.Run(phase="training", step=31, total_steps=170, metrics=metrics))
    display.close()
    lines = capsys.readouterr().out.splitlines()
    named = next(index for index, line in enumerate(lines) if "reward" in line)
    assert lines[named].split()[1:5] == ["step", "reward", "lag", "tokens/s"]
    assert lines[named + 1].split()[1:5] == ["31/170", "0.62", "1.4", "2310"]


@pytest.mark.parametrize(("width", "total"), [(90, 170), (80, 170), (80, 100_000), (60, 170)])
def test_a_panel_keeps_its_height_on_a_narrow_terminal(capsys, width, total):
    for filtered in (0.0, 31.0):
        display = PanelDisplay(Console(width=width, force_terminal=True, color_system=None))
        metrics = {"reward_mean": 0.618, "lag_mean": 1.44, "tokens_per_s": 2310.4, "groups_ready": 31.0}
        metrics |= {"groups_per_step": 32.0, "groups_filtered_since_step": filtered}
        display.show(run_pb2.Run(phase="training", step=total - 1, total_steps=total, metrics=metrics))
        display.close()
        panel = capsys.readouterr().out.rpartition("╭")[2].partition("╯")[0]
        lines = panel.splitlines()
        assert len(lines) == 5, panel
        assert "so far" in lines[2]
        assert f"{total - 1}/{total} " in lines[3]
    assert "31 of 32" in panel
    assert ("2310" in panel) is (width > 60)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(59.4, "59 s"), (335, "5 min 35 s"), (3599.4, "59 min 59 s"), (3600, "1 h 00 min"), (15548, "4 h 19 min")],
)
def test_a_time_is_told_in_its_largest_two_units(seconds, said):
    assert duration(seconds) == said
