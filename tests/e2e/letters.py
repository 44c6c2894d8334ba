"""A third party's environment that a random model can be trained on: every group's rewards differ.

The reward is a matter of the first letter alone. `options.sandbox_s` keeps a program in the sandbox that long for each
group; `options.marker` is then to be found in its command line. With `options.fails` judging raises. The tasks of
training that `options.gated` lists are judged once there is a file `options.gate`. Prompts begin with as many letters
as `options.padding` lists, an `a` as the first number says, a `b` as the second, and so on in turn.
`options.leaves` starts a process of that many seconds, in a session of its own, and leaves it.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

from slipstream.common.sandbox_client import SandboxLimits
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tools import Tools


class Letters:
    """Rewards late letters of the alphabet."""

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._sandbox_s = float(config.options.get("sandbox_s", 0.0))
        self._marker = config.options.get("marker", "")
        self._gated = frozenset(config.options.get("gated", ()))
        self._gate = Path(config.options.get("gate", ""))
        self._padding = [int(count) for count in config.options.get("padding", [0])]
        self._fails = bool(config.options.get("fails", False))
        if leaves_s := config.options.get("leaves", 0):
            subprocess.run(["/bin/sh", "-c", f"sleep {leaves_s} & exit"], start_new_session=True, check=True)

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    def prompt(self, task: Task) -> str:
        variant = task.index % len(self._padding)
        return f"{chr(ord('a') + variant) * self._padding[variant]}{task.split} {task.index}\n"

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        if self._fails:
            raise ArithmeticError("a bug of its own")
        if task.split == "train" and task.index in self._gated:
            while not self._gate.exists():  # noqa: ASYNC110 another process makes it
                await asyncio.sleep(0.05)
        if self._sandbox_s:
            program = f"import time; time.sleep({self._sandbox_s}) # {self._marker}"
            await tools.run_python(program, b"", SandboxLimits(wall_s=self._sandbox_s))
        return [self._score(completion.text) for completion in completions]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        return None

    @staticmethod
    def _score(text: str) -> Score:
        reward = ord(text[0]) / 128 if text else 0.0
        return Score(reward, reward > 0.75)
