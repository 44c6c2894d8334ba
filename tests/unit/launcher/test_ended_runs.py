"""What `slipstream status` says of a run that is over."""

from __future__ import annotations

import json

import pytest

from slipstream.api.run.v1 import run_pb2
from slipstream.launcher.cli import main
from slipstream.launcher.display import LineDisplay
from slipstream.launcher.report import write_report
from slipstream.launcher.rl import conclude
from slipstream.launcher.session import Ending
from slipstream.launcher.status import ended_run


def status(run, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["status", str(run.path)])
    return caught.value.code, capsys.readouterr().out


def test_the_last_sentence_counts_the_steps_that_were_trained_until_a_death(synthetic_run, capsys):
    heard = run_pb2.Run(step=17)  # the orchestrator died before it could tell of more
    assert conclude(synthetic_run, Ending(1, "orchestrator died"), heard, 9.0, LineDisplay()) == 1
    assert "synthetic ended: orchestrator died (20 steps in 9 s; report: " in capsys.readouterr().err


def test_a_run_that_took_traces_has_a_trace_file_at_its_end(synthetic_run, write_lines, capsys):
    path = synthetic_run.path / "trace.json"
    assert conclude(synthetic_run, Ending(0, ""), run_pb2.Run(), 9.0, LineDisplay()) == 0
    assert not path.exists()
    span = {"kind": "span", "name": "group", "start_s": 1.0, "end_s": 2.0, "trace": "a" * 32, "span": "b" * 16}
    write_lines(synthetic_run.path / "timeline" / "orchestrator.jsonl", [span])
    assert conclude(synthetic_run, Ending(0, ""), run_pb2.Run(), 9.0, LineDisplay()) == 0
    assert f"; traces: {path}" in capsys.readouterr().out
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert "group" in names
    assert "train_step" in names, "what else was done is there, too"


@pytest.mark.parametrize("ending", [Ending(0, "", stopped=True), Ending(130, "stopped by SIGINT")])
def test_an_early_end_says_which_steps_no_weights_are_left_of(synthetic_run, capsys, ending):
    option = "trainer.checkpoint.interval_steps sets how often one is written"

    def last_line() -> str:
        conclude(synthetic_run, ending, run_pb2.Run(), 9.0, LineDisplay())
        told = capsys.readouterr()
        return (told.err or told.out).splitlines()[-1]

    assert last_line() == f"no checkpoint holds the weights: the 20 steps trained are lost; {option}"
    for step, says in ((7, "steps 8 to 20 are lost"), (19, "step 20 is lost")):
        checkpoint = synthetic_run.path / "checkpoints" / f"1.{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()
        assert last_line() == f"a checkpoint holds the weights up to step {step}; {says}; {option}"
    (synthetic_run.path / "checkpoints" / "final").mkdir()
    assert "lost" not in last_line()


def test_a_run_that_finished_has_lost_nothing(synthetic_run, capsys):
    conclude(synthetic_run, Ending(0), run_pb2.Run(), 9.0, LineDisplay())
    assert "lost" not in capsys.readouterr().out


def test_a_finished_run_tells_when_how_well_and_where(synthetic_run, capsys):
    write_report(synthetic_run)
    code, printed = status(synthetic_run, capsys)
    assert code == 0
    assert printed == (
        "synthetic finished at 2027-01-15 08:01:30 UTC: 20 of ? steps; "
        "accuracy spell_backward 41.0 % -> 95.5 %, make_number 18.0 % -> 61.0 %; "
        f"report: {synthetic_run.path / 'report.html'}\n"
    )


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ({"exit_code": 1, "reason": "decode-1 died"}, "synthetic failed at 2027-01-15 08:02:00 UTC: decode-1 died; "),
        ({"exit_code": 0, "stopped": True}, "synthetic was stopped at 2027-01-15 08:02:00 UTC: "),
        ({"exit_code": 130, "reason": "stopped by SIGINT"}, "synthetic was stopped at 2027-01-15 08:02:00 UTC: "),
        (None, "synthetic was killed at "),
        ("gone on", "synthetic was killed at "),
    ],
)
def test_a_run_that_did_not_finish_says_how_it_ended(synthetic_run, write_lines, ending, says):
    lines = [
        line for line in (synthetic_run.path / "metrics.jsonl").read_text().splitlines() if '"finished"' not in line
    ]
    (synthetic_run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    events = [{"kind": "run_started", "time_s": 1_800_000_000.0}]
    if ending == "gone on":  # stopped, resumed and killed
        events.append({"kind": "run_ended", "time_s": 1_800_000_060.0, "exit_code": 0, "stopped": True})
        events.append({"kind": "run_started", "time_s": 1_800_000_070.0})
    elif ending is not None:
        events.append({"kind": "run_ended", "time_s": 1_800_000_120.0, **ending})
    write_lines(synthetic_run.path / "launcher.jsonl", events)
    finished, sentence = ended_run(synthetic_run)
    assert not finished
    assert sentence.startswith(says)
    assert "go on" not in sentence, "it writes no checkpoints"
    with synthetic_run.config_file.open("a") as config:
        config.write("\n[trainer.checkpoint]\ninterval_steps = 10\n")
    assert ended_run(synthetic_run)[1] == f"{sentence}; it can go on: slipstream rl --resume synthetic"
    with (synthetic_run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "run", "time_s": 1800000100.0, "state": "stopped", "reason": "a client stopped it"}\n')
    assert "go on" not in ended_run(synthetic_run)[1], "its client ended it for good"
