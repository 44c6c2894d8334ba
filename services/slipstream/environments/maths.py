"""Problems of mathematics with one right answer, judged by math-verify: `0.5`, `\\frac12` and `1/2` are the same.

Judging is symbolic computation on text that nobody has read, so it runs in processes of its own with a limit for each
answer (`judge_server.py`). Problems come from a file or are made up here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

from pydantic import BaseModel, ConfigDict, Field

from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.config_own import MathsConfig
from slipstream.environments.judge_client import JudgeClient
from slipstream.environments.problem_files import ProblemSplit, read_problems
from slipstream.environments.tools import Tools

MADE_UP = 4000
"""Problems that are made up, some of which are the same."""
JUDGED_TAIL_CHARACTERS = 4000
"""The end of an answer, where the result is."""


class MathsProblem(BaseModel):
    """A row of the file. Other fields are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str = Field(min_length=1)
    answer: str = Field(min_length=1, coerce_numbers_to_str=True)


class Maths:
    """Questions with an answer that math-verify compares."""

    def __init__(self, config: MathsConfig, seed: int) -> None:
        self.name = config.name
        self._config = config
        self._seed = seed
        if config.file is None:
            problems = list(made_up(seed, config.max_number))
        else:
            problems = read_problems(config.file, MathsProblem, f"environments.{config.name}.file")
        self._split = ProblemSplit(problems, config.evaluation_task_count, seed, config.name)
        self._judge = JudgeClient(
            "slipstream.environments.maths_judge",
            cpu_s=config.answer_cpu_s,
            memory_bytes=config.answer_memory_bytes,
            concurrency=config.judges,
        )

    def task(self, split: Split, index: int) -> Task:
        return self._split.task(split, index)

    def prompt(self, task: Task) -> str:
        return self._question(self._split[task.payload["number"]])

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        gold = self._split[task.payload["number"]].answer.rpartition("####")[2].strip()
        ended = [index for index, completion in enumerate(completions) if completion.stopped]
        answers = [
            {
                "gold": gold,
                "text": completions[index].text[-JUDGED_TAIL_CHARACTERS:],
                "plain_numbers": self._config.plain_numbers,
            }
            for index in ended
        ]
        scores = [Score(0.0, False, "no end token") for _ in completions]
        for index, verdict in zip(ended, await self._judge.judge(answers) if answers else [], strict=True):
            if verdict.get("unreadable"):
                raise ValueError(verdict["error"])
            correct = verdict.get("correct", False)
            scores[index] = Score(float(correct), correct, verdict.get("error") or verdict["detail"])
        return scores

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        if validation:  # an answer has many forms
            return None
        problem = self._split[self._split.training(f"demonstration/{index}")]
        return self._question(problem), problem.answer

    def _question(self, problem: MathsProblem) -> str:
        return f"{self._config.before}{problem.question}{self._config.after}"


def made_up(seed: int, max_number: int) -> Iterator[MathsProblem]:
    """Sums of fractions, linear equations and remainders, with their answers."""
    rng = random.Random(f"maths/{seed}")

    def number() -> int:
        return rng.randint(2, max_number)

    for _ in range(MADE_UP):
        match rng.randrange(3):
            case 0:
                a, b, c, d = number(), number(), number(), number()
                yield MathsProblem(question=f"{a}/{b}+{c}/{d}=", answer=str(Fraction(a, b) + Fraction(c, d)))
            case 1:
                a, x, b = number(), number(), number()
                yield MathsProblem(question=f"{a}x+{b}={a * x + b}, x=", answer=str(x))
            case _:
                a, b = number() * number(), number()
                yield MathsProblem(question=f"{a} mod {b}=", answer=str(a % b))
