"""What a third party's package may hold."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tools import Tools


class Echo:
    """Rewards an answer that repeats the question."""

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self.greeting = f"{config.options['greeting']} {seed}"

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    def prompt(self, task: Task) -> str:
        return f"{self.greeting} {task.index}"

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        return [Score(1.0, True) if c.text == self.prompt(task) else Score(0.0, False) for c in completions]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        return None


NOT_A_FACTORY = 7
