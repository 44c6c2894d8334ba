"""Environments written for verifiers, as their authors would: nothing in here knows of slipstream."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(count: int = 8) -> vf.Environment:
    """One turn: say a number and one more."""
    rows = [{"question": f"What comes after {n}?", "answer": str(n + 1)} for n in range(count)]

    async def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    async def short(completion: Any) -> float:
        return float(len(completion[-1]["content"]) < 5)

    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="Answer with a number.")


class Guessing(vf.MultiTurnEnv):
    """Several turns: find a number by higher and lower."""

    async def setup_state(self, state: vf.State) -> None:
        state["guesses"] = 0

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        guess, target = int(messages[-1]["content"]), int(state["answer"])
        state["guesses"] += 1
        if guess == target:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [vf.UserMessage(content="higher" if guess < target else "lower")]


def guessing(**options: Any) -> vf.Environment:
    async def found(state: vf.State) -> float:
        return 1.0 if state["final_env_response"] else 0.0

    rows = [{"question": "Find my number from 1 to 9.", "answer": str(n)} for n in range(1, 10)]
    return Guessing(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), **options)


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a * b


def tools() -> vf.Environment:
    async def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    rows = [{"question": "What is 17 times 23? Use the tool.", "answer": "391"}]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[multiply], rubric=vf.Rubric(funcs=[right]))


class Accounts(vf.StatefulToolEnv):
    """Tools whose argument the environment fills in: which account is asked for is none of the model's business."""

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: vf.Messages, state: vf.State, **kwargs: Any
    ) -> dict[str, Any]:
        return {**tool_args, "account": int(state["answer"])}


async def balance(currency: str, account: int) -> str:
    """Read a balance.

    Args:
        currency: in which
        account: whose
    """
    return f"{account * 10} {currency}"


def accounts() -> vf.Environment:
    """Judged by two rubrics together: what was found, and how briefly it was said."""

    async def found(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == f"{int(answer) * 10} EUR")

    async def brief(completion: Any) -> float:
        return float(len(completion[-1]["content"]) < 10)

    rows = [{"question": "How much is there in EUR?", "answer": "7"}]
    rubrics = vf.RubricGroup([vf.Rubric(funcs=[found]), vf.Rubric(funcs=[brief], weights=[0.5])])
    environment = Accounts(dataset=Dataset.from_list(rows), rubric=rubrics)
    environment.add_tool(balance, args_to_skip=["account"])
    return environment


def sums() -> vf.Environment:
    """One that the library ships: tasks of reasoning-gym, judged by that."""
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    return ReasoningGymEnv(gym="chain_sum", num_train_examples=4, num_eval_examples=2, seed=3)


class Restarting(vf.MultiTurnEnv):
    """Tells its history anew before each turn, as compaction does."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return []

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]


def restarting() -> vf.Environment:
    async def turns(state: vf.State) -> float:
        return len(state["trajectory"]) / 10

    rows = [{"question": "begin", "answer": ""}]
    return Restarting(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[turns]), max_turns=3)


def broken() -> vf.Environment:
    class Broken(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            raise ZeroDivisionError("a bug of theirs")

    rows = [{"question": "begin", "answer": ""}]
    return Broken(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[lambda completion: 1.0]))


def judged_as_a_group() -> vf.Environment:
    def ranks(completions: Any) -> list[float]:
        return [1.0 for _ in completions]

    rows = [{"question": "begin", "answer": ""}]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[ranks]))


def no_environment() -> str:
    return "no environment"


def stuck() -> vf.Environment:
    """Never asks the model anything."""

    class Stuck(vf.MultiTurnEnv):
        began = ended = False

        async def setup_state(self, state: vf.State) -> None:
            self.began = True
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            return []

    rows = [{"question": "begin", "answer": ""}]
    return Stuck(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[lambda completion: 1.0]))


def from_a_hub_that_is_away() -> vf.Environment:
    """What the hub's client raises without a network is both."""

    class Away(FileNotFoundError, ValueError):
        pass

    raise Away("cannot reach the hub")
