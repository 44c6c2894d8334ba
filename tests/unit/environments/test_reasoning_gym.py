"""Any data set of reasoning-gym: its scorer judges, and what is held out is never trained on."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections import Counter

import pytest

from slipstream.common.config import ConfigError
from slipstream.environments.base import Completion
from slipstream.environments.config import ReasoningGymConfig
from slipstream.environments.problems import run
from slipstream.environments.reasoning_gym import VALIDATION_TASKS, ReasoningGym, dataset_names, open_problems
from slipstream.environments.registry import build_environments
from slipstream.environments.tools import Tools

FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def environment(**options) -> ReasoningGym:
    values = {"dataset": "chain_sum", "options": FEW, "evaluation_task_count": 20, **options}
    config = ReasoningGymConfig.model_validate(values)
    return ReasoningGym(config, 7)


def test_what_is_held_out_is_not_trained_on_under_another_number():
    sums = environment()
    kept = {sums.prompt(sums.task("held_out", index)) for index in range(20)}
    validating = {shown[0] for i in range(VALIDATION_TASKS) if (shown := sums.demonstration(i, validation=True))}
    trained = {sums.prompt(sums.task("train", index)) for index in range(300)}
    shown = {shown[0] for index in range(300) if (shown := sums.demonstration(index)) is not None}
    assert len(trained) > 20
    assert not (kept | validating) & (trained | shown)
    assert sums.task("held_out", 23).payload == sums.task("held_out", 3).payload
    assert trained == {environment().prompt(environment().task("train", index)) for index in range(300)}


async def test_a_tasks_number_says_its_level_and_every_level_is_held_out():
    levels = [{"min_terms": terms, "max_terms": terms} for terms in (2, 3, 5)]
    sums = environment(options={"min_digits": 1, "max_digits": 1}, levels=levels)

    def terms(task) -> int:
        return sums.prompt(task).count(" + ") + sums.prompt(task).count(" - ") + 1

    assert [terms(sums.task("train", index)) for index in range(12)] == [2, 3, 5] * 4
    assert Counter(terms(sums.task("held_out", index)) for index in range(18)) == {2: 6, 3: 6, 5: 6}
    asked = sums.demonstration(4)
    assert asked is not None
    task = sums.task("held_out", 2)
    answer = str(eval(sums.prompt(task).partition(": ")[2].removesuffix(" =")))
    assert [score.correct for score in await sums.score(task, [Completion(answer, True)], Tools(None))] == [True]


def test_a_curriculum_is_told_of_levels_and_of_data_sets_as_such():
    def parts(**values) -> int | None:
        values = {"dataset": "chain_sum", "curriculum": {"enabled": True}, **values}
        return ReasoningGymConfig.model_validate(values).sequenced()["curriculum"].parts

    mixture = {"dataset": "", "datasets": [{"name": "gcd"}, {"name": "chain_sum"}]}
    assert [parts(), parts(levels=[{}, {}, {}]), parts(**mixture)] == [None, 3, 2]
    assert parts(levels=[{}, {}], curriculum={"enabled": True, "parts": 7}) == 7
    with pytest.raises(ValueError, match="their success rates are their weights"):
        parts(**mixture | {"datasets": [{"name": "gcd", "weight": 2.0}, {"name": "chain_sum"}]})


async def test_its_own_scorer_judges_and_only_the_whole_answer_is_right():
    sums = environment(before="Sum: ", after="?")
    shown = sums.demonstration(0, validation=True)
    assert shown is not None
    task = next(t for i in range(99) if sums.prompt(t := sums.task("held_out", i)))
    question = sums.prompt(task)
    assert question.startswith("Sum: State the final answer")
    assert question.endswith("=?")
    answer = str(eval(question.partition(": ")[2].partition(": ")[2].removesuffix(" =?")))
    texts = [Completion(f" {answer}", True), Completion(f"It is {answer}", True), Completion(answer, False)]
    right, within, endless = await sums.score(task, texts, Tools(None))
    assert (right.reward, right.correct) == (1.0, True)
    assert 0 < within.reward < 0.5
    assert not within.correct
    assert (endless.reward, endless.correct) == (0.0, False)


def test_a_mixture_names_what_reasoning_gym_refuses():
    for options, said in (
        ({"dataset": "chain_gum"}, "sums: reasoning-gym has no data set 'chain_gum'; did you mean 'chain_sum'?"),
        ({"dataset": "zzz"}, "no data set 'zzz'; `slipstream environments` lists those there are"),
        (
            {"datasets": [{"name": "gdc"}]},
            "environments.sums: reasoning-gym has no data set 'gdc'; did you mean 'gcd'?",
        ),
        ({"datasets": [{"name": "gcd", "options": {"x": 2}}]}, "environments.sums: gcd refuses its options"),
        (
            {"dataset": "chain_sum", "options": {"max_term": 2}},
            "environments.sums: chain_sum refuses its options: it has no 'max_term'; did you mean 'max_terms'?",
        ),
        (
            {"dataset": "chain_sum", "options": {"size": 2}},
            "environments.sums: chain_sum refuses its options: it has no 'size'; it has min_terms, max_terms, ",
        ),
        ({"dataset": "chain_sum", "options": {"min_terms": 0}}, "environments.sums: chain_sum refuses its options"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            build_environments([ReasoningGymConfig.model_validate({"name": "sums", **options})], 0)


def test_an_environment_with_too_few_problems_says_so():
    with pytest.raises(ValueError, match="hardly any problem is left"):
        environment(evaluation_task_count=5000).task("train", 0)


@pytest.mark.parametrize("options", ["{bad", "[1]", "[" * 100_000], ids=["bad", "a list", "deep"])
def test_options_that_are_no_json_object_are_told(tmp_path, capsys, options):
    with pytest.raises(SystemExit) as ended:
        run(["chain_sum", str(tmp_path / "x.jsonl"), "--options", options])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"argument --options: '{options}' is no JSON object\n")


def test_problems_are_written_as_conversations_without_a_question_twice(tmp_path, capsys):
    file = tmp_path / "new" / "sums.jsonl"
    assert run(["chain_sum", str(file), "--count", "50", "--options", json.dumps(FEW), "--after", " ..."]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    asked = [row["messages"][0]["content"] for row in rows]
    assert len(set(asked)) == len(rows) == 50
    assert all(text.endswith("= ...") for text in asked)
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert "50 conversations" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no data set 'x'"):
        run(["x", str(file)])


def test_several_data_sets_are_mixed_by_weight_and_each_judged_by_its_own_scorer():
    datasets = [{"name": "gcd", "weight": 3.0}, {"name": "chain_sum", "options": FEW}]
    mixed = environment(dataset="", options={}, datasets=datasets)
    kinds = Counter()
    for index in range(400):
        shown = mixed.demonstration(index)
        assert shown is not None
        kinds["gcd" if "Greatest Common Divisor" in shown[0] else "chain_sum"] += 1
    assert 250 < kinds["gcd"] < 350
    again = environment(dataset="", options={}, datasets=datasets)
    assert [mixed.prompt(mixed.task("train", i)) for i in range(20)] == [
        again.prompt(again.task("train", i)) for i in range(20)
    ]


async def test_an_answer_to_a_problem_of_a_mixture_earns_its_reward():
    mixed = environment(dataset="", options={}, datasets=[{"name": "gcd"}, {"name": "chain_sum", "options": FEW}])
    for index in range(8):
        task = mixed.task("train", index)
        answer = mixed._problems[task.payload["number"]]["answer"]
        right, wrong = await mixed.score(task, [Completion(answer, True), Completion("x", True)], Tools(None))
        assert (right.reward, right.correct, wrong.correct) == (1.0, True, False)


def test_a_section_names_one_data_set_or_several_not_both():
    for options, said in (
        ({}, "dataset: give either it or datasets"),
        ({"dataset": "gcd", "datasets": [{"name": "gcd"}]}, "dataset: give either it or datasets"),
        ({"datasets": [{"name": "gcd"}], "options": {"a": 1}}, "options: each of datasets has its own"),
        ({"datasets": [{"name": "gcd"}, {"name": "gcd"}]}, "datasets: their names must differ"),
    ):
        with pytest.raises(ValueError, match=said):
            ReasoningGymConfig.model_validate(options)


def test_every_data_set_opens_and_holds_its_own_answer_for_right():
    names = dataset_names()
    assert len(names) >= 100
    assert "composite" not in names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # one of them leaves its file to the collector
        for name in names:
            problems = open_problems(name, {}, 3, 50, name)
            problem = problems[0]
            assert problem["answer"] is None or problems.score_answer(problem["answer"], problem) == 1.0, name
        gc.collect()
