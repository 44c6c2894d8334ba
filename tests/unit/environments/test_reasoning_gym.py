"""Any data set of reasoning-gym: its scorer judges, and what is held out is never trained on."""

from __future__ import annotations

import json

import pytest

from slipstream.common.config import ConfigError
from slipstream.environments.base import Completion
from slipstream.environments.config import ReasoningGymConfig
from slipstream.environments.problems import run
from slipstream.environments.reasoning_gym import VALIDATION_TASKS, ReasoningGym
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
        ({"dataset": "chain_gum"}, "environments.sums: reasoning-gym has no data set 'chain_gum'"),
        ({"dataset": "chain_sum", "options": {"terms": 2}}, "environments.sums: chain_sum refuses its options"),
        ({"dataset": "chain_sum", "options": {"min_terms": 0}}, "environments.sums: chain_sum refuses its options"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_environments([ReasoningGymConfig.model_validate({"name": "sums", **options})], 0)


def test_an_environment_with_too_few_problems_says_so():
    with pytest.raises(ValueError, match="hardly any problem is left"):
        environment(evaluation_task_count=5000).task("train", 0)


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
