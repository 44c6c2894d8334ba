"""An environment of agents that look around with a tool, for the environment workers of a test's runner."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.environments.base import Limits, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

LOOK = ToolSpec("look", "Look somewhere.", {"type": "object", "properties": {"at": {"type": "integer"}}})

MANNERS = "Look at what is there before you say anything of it. " * 3


class Looking:
    """Episodes of four turns."""

    limits = Limits(max_turns=4, ends_when_cut=False)
    needs_sandbox = False

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    async def setup(self, task: Task, tools: Tools) -> Look:
        return Look(task.index)


class Look:
    """One of them; its reward is how far it looked."""

    tools: Sequence[ToolSpec] = (LOOK,)

    def __init__(self, number: int) -> None:
        self.messages = [Message("system", MANNERS), Message("user", f"look around, {number}")]
        self._seen: list[int] = []

    async def step(self, message: Message) -> Sequence[Message]:
        if not message.tool_calls:
            return [Message("user", "look")]
        (call,) = message.tool_calls
        self._seen.append(call.arguments["at"])
        return [Message("tool", f"at {self._seen[-1]} there is a cab", tool_call_id=call.id)]

    async def score(self) -> Score:
        return Score(sum(self._seen) / 400, bool(self._seen), f"saw {self._seen}")

    async def close(self) -> None:
        return
