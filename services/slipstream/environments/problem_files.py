"""Problems of a JSONL file, and their split by seed into held-out and training ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from slipstream.common.config import ConfigError
from slipstream.environments.base import Split, Task

Row = TypeVar("Row", bound=BaseModel)


class Asked(Protocol):
    """A problem."""

    @property
    def question(self) -> str: ...


P = TypeVar("P", bound=Asked)


def read_problems(file: Path, row: type[Row], where: str) -> list[Row]:
    """All rows of a file. Raises `ConfigError` that begins with `where` and names the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error}") from None
    problems: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problems.append(row.model_validate(json.loads(line)))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {file}, line {number}: {field}: {first['msg']}") from None
        except ValueError as error:
            raise ConfigError(f"{where}: {file}, line {number}: no JSON: {error}") from None
    return problems


class ProblemSplit(Generic[P]):
    """Problems by number. Of two with the same question the first counts, so that none is in both parts."""

    def __init__(self, problems: Iterable[P], held_out_count: int, seed: int, name: str) -> None:
        """Raises `ConfigError` that begins with `environments.NAME` when none is left to train on."""
        by_question: dict[str, P] = {}
        for problem in problems:
            by_question.setdefault(problem.question, problem)
        self.problems = list(by_question.values())
        if len(self.problems) <= held_out_count:
            raise ConfigError(
                f"environments.{name}: {len(self.problems)} problems, and evaluation_task_count = {held_out_count} of "
                "them are held out: none is left to train on; lower it"
            )
        order = list(range(len(self.problems)))
        random.Random(f"problems/{seed}").shuffle(order)
        self._held_out, self._training = order[:held_out_count], order[held_out_count:]
        self._seed = seed

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, whose payload has the problem's number. Held-out ones repeat after the last."""
        number = self._held_out[index % len(self._held_out)] if split == "held_out" else self.training(index)
        return Task(split, index, {"number": number})

    def training(self, index: int | str) -> int:
        """Number of the training problem at `index`, drawn by seed."""
        return random.Random(f"{self._seed}/{index}").choice(self._training)

    def __getitem__(self, number: int) -> P:
        return self.problems[number]
