"""Mathematics judged by math-verify, in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slipstream.common.config import ConfigError
from slipstream.environments.base import Completion, Score, Task
from slipstream.environments.config_own import MathsConfig
from slipstream.environments.judge_client import JudgeFailed
from slipstream.environments.maths import Maths, made_up
from slipstream.environments.maths_judge import judge
from slipstream.environments.registry import build_environments
from slipstream.environments.tools import Tools

FILE = {"evaluation_task_count": 0, "answer_cpu_s": 1.0}
HOSTILE = (
    "$9^{9^{9^{9}}}$",
    "$\\sum_{n=1}^{999999999} \\frac{1}{n^{3}}$",
    "$" + "(" * 2000 + "1" + ")" * 2000 + "$",
    "\\boxed{" * 300,
)


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[dict[str, Maths]]:
    """Environments to close."""
    kept: dict[str, Maths] = {}
    yield kept
    for maths in kept.values():
        await maths._judge.close()


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [each for child in children for each in descendants(child)]


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def judged(kept: dict[str, Maths], tmp_path: Path, gold: str, *texts: str, **options: object) -> list[Score]:
    """Scores of texts as answers to a question with that right answer."""
    maths = kept.get("maths")
    if maths is None:
        file = written(tmp_path / "one.jsonl", {"question": "how much?", "answer": gold})
        maths = kept["maths"] = Maths(MathsConfig.model_validate({"file": file, **FILE, **options}), 0)
    return await maths.score(maths.task("train", 0), [Completion(text, True) for text in texts], Tools(None))


def verdicts(gold: str, *texts: str, plain_numbers: bool = True) -> list[bool]:
    return [judge({"gold": gold, "text": text, "plain_numbers": plain_numbers})["correct"] for text in texts]


def test_an_answer_is_right_in_any_of_its_forms():
    assert all(verdicts("\\frac{1}{2}", "1/2", "0.5", "it is $\\frac{2}{4}$.", "so \\boxed{0.50}", "50%"))
    assert all(verdicts("x^2+2x+1", "$(x+1)^2$", "$1+x(x+2)$"))
    assert all(verdicts("7", "3+4", "7", "$x=7$", plain_numbers=False))


def test_what_is_not_the_answer_or_several_answers_at_once_is_wrong():
    assert not any(verdicts("\\frac{1}{2}", "2", "nothing", "", "0.5 or 3", "\\boxed{1/2} or \\boxed{1/3}"))
    assert not any(verdicts("x^2+2x+1", "$x^2$"))
    assert not any(verdicts("42", "\\boxed{1,2,42}", "42, then 1 2 3", plain_numbers=False))


def test_a_number_that_is_left_to_compute_is_no_answer():
    assert not any(verdicts("\\frac{1}{2}", "1/4+1/4", "$2^{-1}$"))
    assert judge({"gold": "7", "text": "3+4", "plain_numbers": True})["detail"].endswith("is left to compute")


async def test_an_answer_that_was_cut_earns_nothing(opened):
    maths = opened["maths"] = Maths(MathsConfig(evaluation_task_count=5), 0)
    task = maths.task("train", 3)
    shown = maths._split[task.payload["number"]]
    scores = await maths.score(task, [Completion(shown.answer, False), Completion(shown.answer, True)], Tools(None))
    assert [(score.reward, score.correct) for score in scores] == [(0.0, False), (1.0, True)]
    assert await maths.score(task, [Completion(shown.answer, False)], Tools(None)) == [
        Score(0.0, False, "no end token")
    ]


async def test_hostile_answers_earn_nothing_and_leave_those_beside_them_alone(opened, tmp_path):
    texts = [text for hostile in HOSTILE for text in (hostile, "4242")]
    scores = await judged(opened, tmp_path, "4242", *texts, plain_numbers=False)
    assert [score.correct for score in scores[1::2]] == [True] * len(HOSTILE)
    assert [score.correct for score in scores[::2]] == [False] * len(HOSTILE)
    assert [score.detail for score in scores[:4:2]] == ["out of processor time"] * 2


async def test_a_judge_that_was_killed_is_started_again(opened, tmp_path):
    assert (await judged(opened, tmp_path, "3", "3"))[0].correct
    process = opened["maths"]._judge._process
    process.kill()
    await process.wait()
    assert (await judged(opened, tmp_path, "3", "3"))[0].correct


async def test_nothing_goes_on_judging_for_a_server_that_was_killed(opened, tmp_path):
    judging = asyncio.create_task(judged(opened, tmp_path, "3", HOSTILE[0], plain_numbers=False, answer_cpu_s=600.0))
    async with asyncio.timeout(60):
        while not (maths := opened.get("maths")) or not (server := maths._judge._process):  # noqa: ASYNC110 it tells nobody
            await asyncio.sleep(0.02)
        while len(forked := descendants(server.pid)) < 2:  # noqa: ASYNC110 the request, and the answer it is at
            await asyncio.sleep(0.02)
        server.kill()
        with pytest.raises(JudgeFailed, match="the judge server ended"):
            await judging
        while any(Path(f"/proc/{pid}").exists() for pid in forked):  # noqa: ASYNC110 the kernel ends them
            await asyncio.sleep(0.02)


async def test_a_right_answer_that_cannot_be_read_fails_its_group(opened, tmp_path):
    with pytest.raises(ValueError, match="math-verify cannot read the right answer"):
        await judged(opened, tmp_path, " ", "3")


def test_held_out_problems_are_never_trained_on():
    maths = Maths(MathsConfig(evaluation_task_count=50), 4)
    held_out = {maths.prompt(maths.task("held_out", index)) for index in range(50)}
    trained = {maths.prompt(maths.task("train", index)) for index in range(3000)}
    shown = {maths.demonstration(index) for index in range(500)}
    assert len(held_out) == 50
    assert not held_out & (trained | {pair[0] for pair in shown if pair})
    again = Maths(MathsConfig(evaluation_task_count=50), 4)
    assert again.task("train", 17) == maths.task("train", 17)


def test_made_up_problems_follow_from_the_seed():
    assert list(made_up(3, 9)) == list(made_up(3, 9)) != list(made_up(4, 9))


def test_a_file_that_cannot_be_used_is_refused_by_line(tmp_path):
    good = {"question": "1+1", "answer": 2}
    for rows, said in (
        ([good, {"question": "1+2"}], "line 2: answer: Field required"),
        ([good, {"question": "", "answer": "1"}], "line 2: question: String should have at least 1 character"),
        ([good], r"1 problems, and evaluation_task_count = 200 of them are held out"),
    ):
        file = written(tmp_path / "problems.jsonl", *rows)
        with pytest.raises(ConfigError, match=r"^environments\.maths") as caught:
            build_environments([MathsConfig(file=file)], 0)
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_environments([MathsConfig(file=tmp_path / "none.jsonl")], 0)
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match="line 1: no JSON"):
        build_environments([MathsConfig(file=tmp_path / "bad.jsonl")], 0)


def test_a_question_that_comes_twice_is_one_problem(tmp_path):
    file = written(tmp_path / "twice.jsonl", *[{"question": q, "answer": "1"} for q in ("a", "b", "a", "b", "c")])
    maths = Maths(MathsConfig(file=file, evaluation_task_count=2), 0)
    held_out = {maths.prompt(Task("held_out", 0, maths.task("held_out", i).payload)) for i in range(2)}
    assert len(held_out) == 2
    assert {maths.prompt(maths.task("train", i)) for i in range(20)} == {"a", "b", "c"} - held_out
