"""Any data set of reasoning-gym (https://github.com/open-thought/reasoning-gym), judged by its own scorer."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ReasoningGymConfig
from slipstream.environments.tools import Tools

MAX_TRIES = 1000
"""Problems looked at for one that is not held out."""
VALIDATION_TASKS = 100
"""Problems kept out of training for the warm-up's validation."""


class ReasoningGym:
    """Its problems by number: the first are held out, the next validate, and training draws from the rest.

    A question that is held out is drawn no second time, under whatever number it comes again.
    """

    def __init__(self, config: ReasoningGymConfig, seed: int) -> None:
        self.name = config.name
        self._config = config
        self._seed = seed
        self._apart = config.evaluation_task_count + VALIDATION_TASKS
        size = self._apart + config.train_task_count
        self._problems = open_problems(config.dataset, config.options, seed, size, f"environments.{config.name}")
        self._kept = {self._problems[index]["question"] for index in range(self._apart)}

    def task(self, split: Split, index: int) -> Task:
        if split == "held_out":
            return Task(split, index, {"number": index % max(1, self._config.evaluation_task_count)})
        return Task(split, index, {"number": self._drawn(f"{self._seed}/{index}")})

    def prompt(self, task: Task) -> str:
        return self._question(self._problems[task.payload["number"]])

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        problem = self._problems[task.payload["number"]]
        return [self._score(problem, completion) for completion in completions]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        if validation:
            number = self._config.evaluation_task_count + index % VALIDATION_TASKS
        else:
            number = self._drawn(f"{self._seed}/demonstration/{index}")
        problem = self._problems[number]
        return None if problem["answer"] is None else (self._question(problem), str(problem["answer"]))

    def _question(self, problem: Mapping[str, Any]) -> str:
        return f"{self._config.before}{problem['question']}{self._config.after}"

    def _drawn(self, name: str) -> int:
        """A problem's number for training."""
        rng = random.Random(f"reasoning_gym/{name}")
        for _ in range(MAX_TRIES):
            number = self._apart + rng.randrange(self._config.train_task_count)
            if self._problems[number]["question"] not in self._kept:
                return number
        raise ValueError(f"{self._config.dataset}: hardly any problem is left to train on; hold fewer out")

    def _score(self, problem: dict[str, Any], completion: Completion) -> Score:
        if not completion.stopped:
            return Score(0.0, False, "no end token")
        # Part marks, such as for an answer within other words, are small: only 1.0 is right.
        score = float(self._problems.score_answer(completion.text.strip(), problem))
        return Score(score, score == 1.0, f"score {score:.3f}")


def open_problems(dataset: str, options: Mapping[str, Any], seed: int, size: int, where: str) -> Any:
    """A data set by its name: problems by number, made when they are asked for. Raises `ConfigError`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency of reasoning-gym
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    if dataset not in DATASETS:
        raise ConfigError(f"{where}: reasoning-gym has no data set {dataset!r}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {dataset} refuses its options: {error}") from None
