"""An environment whose rewards are noise: for what a loop costs with a model that knows nothing. It teaches nothing.

Members of a group differ in their rewards, so that every group is trained and every step moves the weights. Prompts are
made-up letters, `options.prompt_characters` of them. Draws depend on seed, task and place in the group alone.

    PYTHONPATH=examples:$PYTHONPATH slipstream rl @ examples/h200-x2.toml
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tools import Tools


class Noise:
    """Letters in, any answer out, a reward from 0 to 1."""

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._seed = seed
        self._characters = int(config.options.get("prompt_characters", 128))

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    def prompt(self, task: Task) -> str:
        letters = random.Random(f"prompt/{self._seed}/{task.split}/{task.index}")
        return "".join(letters.choices(string.ascii_lowercase + " ", k=self._characters))

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        noise = random.Random(f"score/{self._seed}/{task.split}/{task.index}")
        return [Score(noise.random(), correct=False) for _ in completions]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        return None
