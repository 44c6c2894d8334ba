"""Environments of the real verifiers, unchanged, as episodes."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversations import calls, play, says

from slipstream.common.config import ConfigError
from slipstream.environments.called_model import CalledModel, NoMoreTurns
from slipstream.environments.config_adapters import VerifiersConfig
from slipstream.environments.messages import Message
from slipstream.environments.tools import Tools
from slipstream.environments.verifiers import Verifiers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def environment(function: str, **fields: Any) -> Verifiers:
    config = {"path": f"their_verifiers:{function}", "evaluation_task_count": 0, **fields}
    return Verifiers(VerifiersConfig.model_validate(config), 0)


async def test_one_turn_is_scored_by_its_rubric() -> None:
    theirs = environment("load_environment")
    row = theirs.task("train", 3).payload["row"]
    played = await play(theirs, says(str(row + 1)), index=3)
    assert [(m.role, m.content) for m in played.history] == [
        ("system", "Answer with a number."),
        ("user", f"What comes after {row}?"),
        ("assistant", str(row + 1)),
    ]
    assert (played.score.reward, played.score.correct) == (1.25, True)
    assert played.score.detail.startswith("right 1, short 1")
    assert (await play(theirs, says("something else"), index=3)).score.reward == 0.0


async def test_several_turns_go_on_from_what_the_environment_answers() -> None:
    theirs = environment("guessing")
    target = theirs.task("train", 1).payload["row"] + 1

    def halves(history: Sequence[Message]) -> Message:
        low, high = 1, 9
        for said, heard in zip(history[1::2], history[2::2], strict=False):
            low, high = (int(said.content) + 1, high) if heard.content == "higher" else (low, int(said.content) - 1)
        return Message("assistant", str((low + high) // 2))

    played = await play(theirs, halves, index=1)
    assert played.history[-1].content == str(target)
    assert (played.score.reward, played.score.correct, played.contexts) == (1.0, True, 0)


async def test_a_rollout_that_has_had_its_last_turn_is_scored_as_it_is() -> None:
    theirs = environment("guessing", correct_at=0.5)
    assert theirs.limits.max_turns == 64
    target = theirs.task("train", 0).payload["row"] + 1
    played = await play(theirs, says(str(target % 9 + 1)), max_turns=3)
    assert (played.score.reward, played.score.correct) == (0.0, False)
    assert environment("guessing", options={"max_turns": 4}).limits.max_turns == 4


async def test_its_tools_are_shown_and_their_answers_come_back() -> None:
    theirs = environment("tools")
    asked = calls(("multiply", {"a": 17, "b": 23}))

    def model(history: Sequence[Message]) -> Message:
        last = history[-1]
        return Message("assistant", last.content) if last.role == "tool" else asked(history)

    played = await play(theirs, model)
    assert [tool.name for tool in played.shown_tools] == ["multiply"]
    assert played.shown_tools[0].parameters["required"] == ["a", "b"]
    tool_answer = next(m for m in played.history if m.role == "tool")
    assert (tool_answer.content, tool_answer.tool_call_id) == ("391", "call-1")
    assert (played.score.reward, played.score.correct) == (1.0, True)


async def test_tools_that_know_the_state_and_several_rubrics_work_as_they_are() -> None:
    theirs = environment("accounts")
    asked = calls(("balance", {"currency": "EUR"}))

    def model(history: Sequence[Message]) -> Message:
        last = history[-1]
        return Message("assistant", last.content) if last.role == "tool" else asked(history)

    played = await play(theirs, model)
    assert list(played.shown_tools[0].parameters["properties"]) == ["currency"], "the model is not asked whose"
    assert next(m.content for m in played.history if m.role == "tool") == "70 EUR"
    assert played.score.reward == 1.5
    assert "found 1, brief 1" in played.score.detail


async def test_an_environment_that_the_library_ships_runs_as_it_is() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency of reasoning-gym, where it is compiled
        theirs = environment("sums", evaluation_task_count=2)
    assert [len(theirs._tasks[split]) for split in ("train", "held_out")] == [4, 2]
    shipped: Any = theirs.environment
    wrong, right = [], []
    for index in range(2):
        played = await play(theirs, says("<answer>no number</answer>"), split="held_out", index=index)
        wrong.append(played.score.reward)
        row = theirs._tasks["held_out"][theirs.task("held_out", index).payload["row"]]
        entry = shipped.rg_dataset[int(row["answer"])]
        said = says(f"<answer>{entry['answer']}</answer>")
        right.append((await play(theirs, said, split="held_out", index=index)).score.reward)
    assert max(wrong) < min(right) == 1.0


async def test_a_history_that_is_told_anew_is_a_context_of_its_own() -> None:
    played = await play(environment("restarting"), says("yes"))
    assert played.contexts == 2
    assert [m.content for m in played.history] == ["turn 2", "yes"]
    assert played.score.reward == pytest.approx(0.3)


async def test_what_its_code_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug of theirs"):
        await play(environment("broken"), says("yes"))


async def test_a_rollout_that_never_asks_ends_with_its_setup() -> None:
    theirs = environment("stuck")
    stuck: Any = theirs.environment
    setup = asyncio.create_task(theirs.setup(theirs.task("train", 0), Tools(None)))
    async with asyncio.timeout(30):
        while not stuck.began:  # noqa: ASYNC110 their code tells nobody
            await asyncio.sleep(0)
        setup.cancel()
        await asyncio.wait([setup])
    assert setup.cancelled()
    assert stuck.ended


async def test_a_loop_that_asks_again_whatever_it_is_told_holds_up_nobody() -> None:
    async def again_and_again(ask: Any) -> None:
        while True:
            with contextlib.suppress(NoMoreTurns):
                await ask([Message("user", "?")], [])

    loop = CalledModel(again_and_again)
    await loop.first()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await loop.result()
    await loop.close()


def test_held_out_rows_are_never_trained_on() -> None:
    theirs = environment("load_environment", evaluation_task_count=3)
    held_out = {theirs._tasks["held_out"][theirs.task("held_out", i).payload["row"]]["answer"] for i in range(3)}
    trained = {theirs._tasks["train"][theirs.task("train", i).payload["row"]]["answer"] for i in range(200)}
    assert len(held_out) == 3
    assert held_out | trained == {str(n) for n in range(1, 9)}
    assert not held_out & trained


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"path": "their_verifiers:no_environment"}, "gives a str, which is no environment of verifiers"),
        ({"path": "their_verifiers:missing"}, "has no attribute 'missing'"),
        ({"path": "their_verifiers:judged_as_a_group"}, "its rubric judges whole groups"),
        ({"path": "their_verifiers:load_environment", "options": {"x": 1}}, "unexpected keyword argument 'x'"),
        ({"path": "their_verifiers:load_environment", "evaluation_task_count": 8}, "none is left to train on"),
        ({"id": "no-such-environment"}, "verifiers cannot load 'no-such-environment'"),
    ],
)
def test_what_cannot_be_used_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^environments\.verifiers: ") as caught:
        Verifiers(VerifiersConfig.model_validate({"evaluation_task_count": 0, **fields}), 0)
    assert said in str(caught.value)


def test_what_could_not_be_fetched_is_not_refused_since_another_start_may_have_it() -> None:
    with pytest.raises(FileNotFoundError, match="cannot reach the hub"):
        environment("from_a_hub_that_is_away")
