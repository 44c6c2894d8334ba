"""A third party's game for two: they count down in turn from the task's number, which `options.behaviour` changes.

The workers of these tests answer the last word they were told.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.environments.base import Context, Limits, RoleScores, Score, Split, Task, Turn
from slipstream.environments.config import ImportedConfig
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools


class CountingTogether:
    """Begins games."""

    roles = ("even", "odd", "nobody")
    limits = Limits(max_turns=9)
    needs_sandbox = False

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._behaviour = config.options.get("behaviour", "")

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    async def setup(self, task: Task, tools: Tools) -> CountTogether:
        return CountTogether(task.index, self._behaviour)


class CountTogether:
    """One game: whoever is odd says the odd numbers."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, number: int, behaviour: str) -> None:
        self._left = number
        self._behaviour = behaviour
        self._said: dict[str, list[str]] = {"even": [], "odd": []}
        self.role = ("even", "odd")[number % 2]
        self.messages = [Message("user", f"say {number}")]

    async def step(self, message: Message) -> Sequence[Message] | Context | Turn:
        self._said[self.role].append(message.content)
        self._left -= 1
        if not self._left:
            return []
        self.role = ("even", "odd")[self._left % 2]
        said = [Message("user", f"say {self._left}")]
        match self._behaviour:
            case "asks a stranger":
                return Turn("nowhere", said)
            case "asks for nothing":
                return Turn(self.role, [])
            case "forgets":
                return Context(said, role=self.role)
            case _:
                return Turn(self.role, said)

    async def score(self) -> RoleScores | Score:
        if self._behaviour == "has one score":
            return Score(1.0, True)
        scores = {role: Score(float(len(said)), bool(said), f"said {said}") for role, said in self._said.items()}
        if self._behaviour == "lacks a score":
            del scores["odd"]
        return RoleScores(scores)

    async def close(self) -> None:
        return
