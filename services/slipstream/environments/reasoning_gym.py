"""Data sets of reasoning-gym (https://github.com/open-thought/reasoning-gym), judged by their own scorers."""

from __future__ import annotations

import dataclasses
import difflib
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import suggest
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config import ProblemSetConfig, ReasoningGymConfig
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
        where = f"environments.{config.name}"
        self._level_count = config.level_count
        if self._level_count > 1:
            entries = config.datasets or [
                ProblemSetConfig(name=config.dataset, options={**config.options, **level}) for level in config.levels
            ]
            size_each = size // len(entries) + 2
            self._problems = Levels(
                [open_problems(entry.name, entry.options, seed, size_each, where) for entry in entries]
            )
        elif config.datasets:
            self._problems = open_mixture(config.datasets, seed, size, where)
        else:
            self._problems = open_problems(config.dataset, config.options, seed, size, where)
        self._kept = {self._problems[index]["question"] for index in range(self._apart)}

    def task(self, split: Split, index: int) -> Task:
        if split == "held_out":
            return Task(split, index, {"number": index % max(1, self._config.evaluation_task_count)})
        return Task(split, index, {"number": self._drawn(f"{self._seed}/{index}", index % self._level_count)})

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

    def _drawn(self, name: str, level: int | None = None) -> int:
        """A problem's number for training, of any level or of this one."""
        rng = random.Random(f"reasoning_gym/{name}")
        for _ in range(MAX_TRIES):
            number = self._apart + rng.randrange(self._config.train_task_count)
            number += 0 if level is None else (level - number) % self._level_count
            if self._problems[number]["question"] not in self._kept:
                return number
        raise ValueError(f"{self.name}: hardly any problem is left to train on; hold fewer out")

    def _score(self, problem: dict[str, Any], completion: Completion) -> Score:
        if not completion.stopped:
            return Score(0.0, False, "no end token")
        # Part marks, such as for an answer within other words, are small: only 1.0 is right.
        score = float(self._problems.score_answer(completion.text.strip(), problem))
        return Score(score, score == 1.0, f"score {score:.3f}")


class Levels:
    """Several data sets as one: a problem is of the level of its number modulo their count."""

    def __init__(self, problems: Sequence[Any]) -> None:
        self._levels = list(problems)

    def __getitem__(self, number: int) -> dict[str, Any]:
        place, level = divmod(number, len(self._levels))
        return {**self._levels[level][place], "level": level}

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        """By the scorer of the problem's own data set."""
        return self._levels[entry["level"]].score_answer(answer, entry)


def open_problems(dataset: str, options: Mapping[str, Any], seed: int, size: int, where: str) -> Any:
    """A data set by its name: problems by number, made when they are asked for. Raises `ConfigError`."""
    known = dataset_names()
    if dataset not in known:
        near = suggest(difflib.get_close_matches(dataset, known, n=1))
        hint = near or "; `slipstream environments` lists those there are"
        raise ConfigError(f"{where}: reasoning-gym has no data set {dataset!r}{hint}")
    import reasoning_gym

    names = _option_names(dataset)
    for name in options if names else ():
        if name not in names:
            near = suggest(difflib.get_close_matches(name, names, n=1))
            hint = near or f"; it has {', '.join(names)}"
            raise ConfigError(f"{where}: {dataset} refuses its options: it has no {name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {dataset} refuses its options: {error}") from None


def _option_names(dataset: str) -> list[str]:
    """Fields of a data set's configuration; seed and size are ours to give. Empty where it does not say."""
    from reasoning_gym.factory import DATASETS

    config_class = DATASETS[dataset][1]
    fields = dataclasses.fields(config_class) if dataclasses.is_dataclass(config_class) else ()
    return [field.name for field in fields if field.name not in ("seed", "size")]


def open_mixture(entries: Sequence[ProblemSetConfig], seed: int, size: int, where: str) -> Any:
    """Several data sets by weight, as one. Raises `ConfigError`."""
    for entry in entries:  # each by itself, so that a refusal names it
        open_problems(entry.name, entry.options, seed, size, where)
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec

    specs = [DatasetSpec(entry.name, entry.weight, dict(entry.options)) for entry in entries]
    return CompositeDataset(CompositeConfig(size=size, seed=seed, datasets=specs))


def dataset_names() -> list[str]:
    """Data sets of the installed reasoning-gym, by name; mixtures are `datasets`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency of reasoning-gym
        from reasoning_gym.factory import DATASETS
    return sorted(name for name in DATASETS if name != "composite")
