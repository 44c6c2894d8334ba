"""`slipstream eval`: its command line, what it reads back, and how it shows it. Whole evaluations are in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.algorithms.evaluation import Answer
from slipstream.launcher.cli import main
from slipstream.launcher.evaluate import counts_of, parse, weights_of
from slipstream.launcher.evaluate_checkpoint import answers_of
from slipstream.launcher.evaluate_results import EnvironmentAnswers, print_method, print_result, result_of, write_result
from slipstream.launcher.rundir import RunDir

CONFIG = """
[[environments]]
type = "spell_backward"
evaluation_task_count = 5

[[environments]]
type = "expression"
evaluation_task_count = 0
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "runs" / "ended"
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return path


def said(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out + shown.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "which run, or which configuration?"),
        (("nowhere",), "no run called nowhere"),
        (("ended", "@", "f.toml"), "'@' beside a run"),
        (("ended", "--run.seed", "3"), "'--run.seed' beside a run"),
        (("ended", "again"), "'again' is not understood"),
        (("--sample", "3"), "did you mean --samples?"),
        (("--samples", "0"), "--samples takes a number from 1 to 256, not '0'"),
        (("--temperature", "hot"), "--temperature takes a number from 0 to 10"),
        (("--seed",), "--seed takes a value"),
        (("ended",), "ended has left no weights"),
        (("ended", "--checkpoint", "3"), "ended has no checkpoint 3; it has none"),
        (("@", "f.toml", "--checkpoint", "3"), "--checkpoint takes a run"),
        (("@", "missing.toml"), "missing.toml"),
    ],
)
def test_mistakes_are_told_in_one_line(run, capsys, arguments, sentence):
    code, text = said(capsys, *arguments)
    assert (code, text.count("\n")) == (2, 1), text
    assert sentence in text


def test_no_more_problems_are_asked_than_are_configured(run):
    from slipstream.common.config import ConfigError
    from slipstream.common.config_files import load_with_origins
    from slipstream.launcher.config import RUN_CONFIG

    config, _ = load_with_origins(RUN_CONFIG, [run / "config.toml"], [])
    assert counts_of(config, parse([])) == {"spell_backward": 5, "expression": 0}
    assert counts_of(config, parse(["--problems=2", "--environment", "spell_backward"])) == {"spell_backward": 2}
    for arguments, sentence in (
        (["--problems", "6"], "spell_backward has 5"),
        (["--environment", "expression"], "no problem to ask"),
        (["--environment", "words"], "there are spell_backward, expression"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            counts_of(config, parse(arguments))


def test_files_and_fields_of_the_configuration_are_handed_on():
    options = parse(["@", "a.toml", "@b.toml", "--run.seed", "3", "--samples=4", "--model", "m", "--decode.replicas=2"])
    assert options.rest == ["@", "a.toml", "@b.toml", "--run.seed", "3", "--decode.replicas=2"]
    assert (options.samples, options.model) == (4, Path("m"))


def test_the_last_weights_are_taken_and_the_first_are_named(run):
    told: list[str] = []
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").touch()
    assert weights_of(RunDir(run), told.append) == run / "model"
    assert told == ["ended did not come to its end: these are the weights it began with"]
    (run / "checkpoints" / "1.4").mkdir(parents=True)
    assert weights_of(RunDir(run), told.append) == run / "model", "no checkpoint that is whole"
    assert told.pop() == told[0]
    (run / "checkpoints" / "final").mkdir(parents=True)
    (run / "checkpoints" / "final" / "model.safetensors").touch()
    assert weights_of(RunDir(run), told.append) == run / "checkpoints" / "final"
    assert len(told) == 1


def sample(task: int, number: int, attempt: int = 1, *, correct: bool, reason: str = "stop") -> dict[str, object]:
    return {
        "purpose": "evaluation", "environment": "words", "task_index": task, "attempt": attempt, "sample": number,
        "correct": correct, "reward": float(correct), "finish_reason": reason, "versions": [[3, "1.0"], [2, "1.1"]],
    }  # fmt: skip


def test_answers_are_read_back_problem_by_problem(run, write_lines, write_rollouts):
    write_rollouts(run / "rollouts" / "runner-1.evaluation.jsonl.zst", [
        sample(7, 1, correct=False) | {"cut": "context"}, sample(7, 0, correct=True, reason="length"),
        sample(2, 0, attempt=1, correct=False), sample(2, 0, attempt=2, correct=True), sample(2, 1, 2, correct=True),
    ])  # fmt: skip
    told = {"kind": "evaluation", "name": "eval", "environment": "words", "step": 0, "accuracy": 0.5, "count": 3}
    write_lines(run / "metrics.jsonl", [told])
    found = answers_of(RunDir(run), {"words": 5, "none": 0}, samples=2)
    assert list(found) == ["words"]
    words = found["words"]
    assert [[a.correct for a in each] for each in words.problems] == [[True, True], [True, False], [False, False]]
    assert words.problems[1] == [Answer(True, 1.0, 5, True), Answer(False, 0.0, 5, True)]
    assert not any(answer.truncated for answer in words.problems[0])
    assert (words.failed, words.unanswered, words.versions) == (1, 2, {"1.0", "1.1"})


def test_the_result_is_a_table_json_and_a_page(tmp_path, capsys):
    right, wrong = Answer(True, 1.0, 10, False), Answer(False, 0.0, 30, True)
    answers = {
        "a<b": EnvironmentAnswers([[right, wrong, wrong, wrong], [right] * 4], unanswered=1, versions={"1.0"}),
        "empty": EnvironmentAnswers(unanswered=3),
    }
    result = result_of({"of": "a model", "samples": 4}, answers, seed=1)
    assert result == result_of({"of": "a model", "samples": 4}, answers, seed=1)
    figures = result["environments"]["a<b"]
    assert (figures["accuracy"], figures["pass_at_k"]) == (0.625, {"1": 0.625, "2": 0.75, "4": 1.0})
    assert figures["tokens_mean"] == pytest.approx(17.5)
    page = write_result(result, tmp_path / "1")
    assert json.loads((tmp_path / "1" / "evaluation.json").read_text()) == result
    text = page.read_text()
    assert "a&lt;b: one of k answers is right" in text
    assert "a<b" not in text
    print_result(result)
    shown = capsys.readouterr().out
    assert "2 of 3" in shown
    assert "62.5 % [" in shown
    assert shown.splitlines()[0] == "4 answers to each problem, greedy"
    assert [line.split() for line in shown.splitlines() if line.startswith(("pass@k, %", "a<b "))][1:] == [
        ["pass@k,", "%", "1", "2", "4"], ["a<b", "62.5", "75.0", "100.0"],
    ]  # fmt: skip
    assert "k 4" in shown
    assert "\x1b" not in shown


def test_the_table_fits_a_terminal_and_cuts_no_name(capsys, monkeypatch):
    """Whatever has no room in it is in the JSON."""
    problems = [[Answer(i % 2 == 0, -2.0 * (i % 3), 1000 + i, i % 5 == 0)] * 256 for i in range(30)]
    long_name = "an_environment_with_a_name_longer_than_anybody_types"
    answers = {
        "spell_backward": EnvironmentAnswers(problems, unanswered=1020, temperature=0.7),
        long_name: EnvironmentAnswers(problems, failed=12),
    }
    result = result_of({"of": "a model"}, answers, seed=1)
    for columns in (80, 100):
        monkeypatch.setattr("slipstream.launcher.evaluate_results.WIDTH", columns)
        print_result(result)
        print_method(result)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= columns
        assert "30 of 1050  50.0 % [33, 67]  -2.000 [-2.60, -1.40]  1014.5   20.0 %" in shown
        head, _, table = shown.partition("failed")
        ways = "spell_backward: 256 answers to each problem, temperature 0.7 {}: 256 answers to each problem, greedy"
        assert " ".join(head.split()).startswith(ways.format(long_name))
        names = "".join(line.split()[0] for line in table.partition("pass@k")[0].splitlines() if line.strip())
        assert names == f"spell_backward{long_name}"


def test_roles_are_read_back_and_have_rows_of_their_own(run, tmp_path, write_lines, write_rollouts, capsys):
    roles = [{"role": "w<b", "reward": 1.0, "correct": True}, {"role": "black", "reward": -1.0, "correct": False}]
    played = [{**sample(task, 0, correct=True), "roles": roles} for task in range(2)]
    write_rollouts(run / "rollouts" / "runner-1.evaluation.jsonl.zst", played)
    told = {"kind": "evaluation", "name": "eval", "environment": "words", "step": 0, "accuracy": 1.0, "count": 2}
    write_lines(run / "metrics.jsonl", [told])
    result = result_of({"of": "a game"}, answers_of(RunDir(run), {"words": 2}, samples=1), seed=1)
    assert result["environments"]["words"]["roles"]["black"] == {
        "reward_mean": -1.0, "accuracy": 0.0, "answer_count": 2,
    }  # fmt: skip
    print_result(result)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "as black" in line]
    assert row.split() == ["as", "black", "2", "answers", "0.0", "%", "-1.000"]
    text = write_result(result, tmp_path / "1").read_text()
    assert "words as w&lt;b" in text
    assert "w<b" not in text


def answered(rights: int, of: int, samples: int = 4) -> EnvironmentAnswers:
    right, wrong = Answer(True, 1.0, 10, False), Answer(False, 0.0, 30, True)
    return EnvironmentAnswers(
        [[right] * (samples // 2) + [wrong] * (samples // 2)] * rights + [[wrong] * samples] * (of - rights)
    )


def compared(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plot", "--evaluations", *arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out + shown.err


def test_evaluations_are_compared_by_the_names_of_their_runs(run, capsys):
    for number in (1, 2, 10):
        result = result_of({"of": "ended"}, {"words": answered(number, 10), "sums": answered(1, 2)}, seed=1)
        write_result(result, run / "evaluations" / str(number))
    other = run.parent / "other-eval"
    write_result(result_of({"of": "other"}, {"words": answered(3, 10, samples=8)}, seed=1), other)
    (other / "config.toml").write_text(CONFIG)
    code, text = compared(capsys, "ended", "other-eval")
    assert code == 0
    words, sums = text.split("\nsums\n")
    assert words.startswith("words\n")
    rows = [line.split()[:4] for line in words.splitlines() if " % [" in line]
    assert rows == [
        ["ended/1", "10", "5.0", "%"], ["ended/2", "10", "10.0", "%"], ["ended/10", "10", "50.0", "%"],
        ["other-eval", "10", "15.0", "%"],
    ]  # fmt: skip
    assert "ended/1, ended/2, ended/10: 4 answers to each problem, greedy" in words
    assert "other-eval: 8 answers to each problem, greedy" in words
    assert "pass@k  • ended/1 0.1  x ended/2 0.2  + ended/10 1  o other-eval 0.3" in words
    assert "other-eval" not in sums
    assert max(map(len, text.splitlines())) <= 100
    only = compared(capsys, "runs/ended/evaluations/2", "ended/evaluations/10")[1]
    assert [line.split()[0] for line in only.splitlines() if " % [" in line] == ["ended/2", "ended/10"] * 2


@pytest.mark.parametrize(
    "strange",
    [{"problems": None}, {"accuracy": "all"}, {"temperature": float("nan")}, {"tokens_mean": 10**400},
     {"accuracy_interval": [0.1]}, {"reward_interval": [None, 1.0]}, {"pass_at_k": None}, {"pass_at_k": {"a": 0.5}},
     {"pass_at_k": {"1": float("nan"), "2": 0.5}}, {"roles": None}, {"roles": {"white": {}}}],
    ids=str,
)  # fmt: skip
def test_an_evaluation_of_other_types_is_told_in_one_line(run, capsys, strange):
    result = result_of({"of": "ended"}, {"words": answered(3, 10)}, seed=1)
    path = write_result(result, run / "evaluations" / "1").with_suffix(".json")
    assert compared(capsys, "ended")[0] == 0
    result["environments"]["words"] |= strange
    path.write_text(json.dumps(result))
    assert compared(capsys, "ended") == (
        2,
        f"error: {run / 'evaluations/1/evaluation.json'} is no evaluation, or is damaged\n",
    )
    path.write_text("[" * 100_000)
    code, text = compared(capsys, "ended")
    assert (code, text.count("\n")) == (2, 1), text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ended",), "ended has no evaluation; slipstream eval ended makes one"),
        (("nowhere",), "no run called nowhere"),
        (("ended", "--metric", "loss"), "--evaluations takes no --metric"),
        (("ended/evaluations/7",), "runs/ended/evaluations/7/evaluation.json is no evaluation, or is damaged"),
        (("ended/evaluations/8",), "runs/ended/evaluations/8/evaluation.json cannot be read: Unterminated string"),
    ],
)
def test_what_is_no_evaluation_is_told_in_one_line(run, capsys, arguments, sentence):
    for number, text in ((7, '{"environments": {"words": {"accuracy": 1}}}'), (8, '{"environ')):
        if f"ended/evaluations/{number}" in arguments:
            (run / "evaluations" / str(number)).mkdir(parents=True)
            (run / "evaluations" / str(number) / "evaluation.json").write_text(text)
    code, text = compared(capsys, *arguments)
    assert (code, text.count("\n")) == (2, 1), text
    assert sentence in text
