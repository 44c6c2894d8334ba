"""A third party's environment with turns: count down from the task's number. `options.behaviour` says how it differs.

The workers of these tests answer the last word they were told.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from slipstream.common.errors import Unreachable
from slipstream.environments.base import Context, Limits, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools


class Unsayable(Exception):
    """An error whose text is one, too."""

    def __str__(self) -> str:
        raise RecursionError


class CountingDown:
    """Begins episodes; the second of each group is the one that misbehaves."""

    limits = Limits(max_turns=5)
    needs_sandbox = False

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._behaviour = config.options.get("behaviour", "")
        self._folder = Path(config.options.get("folder", os.devnull))
        self._numbers = itertools.count()

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    async def setup(self, task: Task, tools: Tools) -> CountDown:
        bad = next(self._numbers) % 2 == 1
        if bad and self._behaviour == "raises at setup":
            raise LookupError("no room")
        if self._behaviour == "waits at setup":
            (self._folder / "asked").touch()
            while not (self._folder / "go").exists():  # noqa: ASYNC110 a test makes it
                await asyncio.sleep(0.02)
        return CountDown(task.index, self._behaviour, bad, self._folder)


class CountDown:
    """One episode."""

    def __init__(self, number: int, behaviour: str, bad: bool, folder: Path) -> None:
        self._folder = folder
        self._number = self._left = number
        self._behaviour = behaviour
        self._bad = bad
        self._right = 0
        self.messages = [Message("user", f"say {number}")]
        if behaviour == "names its process":
            self.messages = [Message("user", f"say {number} to {os.getpid()}")]
        self.tools: Sequence[ToolSpec] = []
        if behaviour == "has a tool":
            self.tools = [ToolSpec("look")]
            self.messages = [Message("user", "say <tool_call>{look}</tool_call>")]

    async def step(self, message: Message) -> Sequence[Message] | Context:
        if message.tool_calls:
            return [Message("tool", f"saw {self._number}", tool_call_id=message.tool_calls[0].id)]
        if self.tools and message.content != str(self._number):
            return [Message("user", 'no, <tool_call>{"name":"look"}</tool_call>')]
        if self._bad and self._left < self._number:
            match self._behaviour:
                case "raises at a step":
                    raise ZeroDivisionError("a bug of its own")
                case "raises what cannot be shown":
                    raise Unsayable
                case "exits at a step":
                    sys.exit(3)
                case "cancels at a step":
                    raise asyncio.CancelledError
                case "says what is no JSON":
                    nameless: Any = UUID(int=0)
                    return [Message("tool", "now", tool_call_id=nameless)]
                case "finds no sandbox":
                    raise RuntimeError("a program was not run") from Unreachable("connection refused")
                case "blocks once":
                    if not (self._folder / "blocked").exists():
                        (self._folder / "blocked").touch()
                        time.sleep(3600)  # noqa: ASYNC251 blocking is the point
                case "hangs":
                    await asyncio.sleep(3600)
        self._right += message.content == str(self._left)
        self._left -= 1
        if self._left == 0:
            return []
        told = Message("user", f"now {self._left}")
        if self._behaviour == "never says the same twice":
            told = Message("user", f"in {os.getpid()} now {self._left}")
        if self._behaviour == "compacts" and self._left == 1:
            return Context([told])
        return [told]

    async def score(self) -> Score:
        if self._bad and self._behaviour == "raises at the score":
            raise KeyError("lost")
        return Score(self._right / self._number, self._right == self._number, f"{self._right} right")

    async def close(self) -> None:
        if self._folder.is_dir():
            with (self._folder / "closed").open("a") as closed:
                closed.write("x")
