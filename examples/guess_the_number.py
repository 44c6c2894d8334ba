"""An environment that takes turns: guess a digit, being told after each guess where the right one is.

PYTHONPATH=examples:$PYTHONPATH slipstream rl @ examples/guess-the-number.toml
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from slipstream.environments.base import Limits, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools


class GuessTheNumber:
    """Tasks are digits; each rollout of a group guesses the same one."""

    limits = Limits(max_turns=4, ends_when_cut=False)  # a guess is one token, and needs no end
    needs_sandbox = False

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._seed = seed

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index, {"digit": random.Random(f"{self._seed}/{split}/{index}").randrange(10)})

    async def setup(self, task: Task, tools: Tools) -> Guessing:
        return Guessing(task.payload["digit"])


class Guessing:
    """One rollout."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, digit: int) -> None:
        self.messages = [Message("user", "0-9?")]
        self._digit = digit
        self._guesses: list[str] = []

    async def step(self, message: Message) -> Sequence[Message]:
        guess = message.content[:1]
        self._guesses.append(guess)
        if guess == str(self._digit):
            return []
        if guess not in "0123456789" or not guess:
            return [Message("user", "a digit")]
        return [Message("user", "up" if int(guess) < self._digit else "down")]

    async def score(self) -> Score:
        """Right guesses count, the sooner the more; digits a little, or a random start would see no reward."""
        right = self._guesses[-1] == str(self._digit)
        digits = sum(guess in "0123456789" and bool(guess) for guess in self._guesses) / len(self._guesses)
        return Score(0.3 * digits + 0.7 * right / len(self._guesses), right, f"{self._digit}: {self._guesses}")

    async def close(self) -> None:
        return
