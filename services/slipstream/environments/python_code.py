"""Write a Python program: judged by hidden tests, which run in the sandbox.

Neither the model nor the program sees what is expected: the sandbox gets a program and inputs, and gives back outputs,
which are compared here. So a program that exits early, prints what a judge would, or changes what runs beside it can
make its own outputs wrong and no more.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slipstream.common.config import ConfigError
from slipstream.common.sandbox_client import SandboxLimits
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.code_harness import encoded
from slipstream.environments.config_own import PythonCodeConfig
from slipstream.environments.problem_files import ProblemSplit, read_problems
from slipstream.environments.tools import Tools

BUILT_IN = Path(__file__).with_name("data") / "python_problems.jsonl"
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
CLOSE = 1e-6
"""Floating-point numbers that differ by this part are the same."""


class CodeTest(BaseModel):
    """One hidden test: what is read and must be printed, or a call and its value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stdin: str | None = None
    stdout: str | None = None
    call: str | None = None
    """A Python expression, such as `area(2, 3)`."""
    expected: str | None = None
    """The value of `call` as a Python literal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.stdout is None) == (self.call is None) or (self.call is None) != (self.expected is None):
            raise ValueError("a test has stdout, after stdin if it reads any, or call and expected")
        if self.expected is not None:
            try:
                encoded(ast.literal_eval(self.expected))
            except (SyntaxError, TypeError, ValueError) as error:
                raise ValueError(f"expected is no Python literal that can be compared: {error}") from None
        return self


class CodeProblem(BaseModel):
    """A row of the file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str = Field(min_length=1)
    tests: list[CodeTest] = Field(min_length=1, max_length=200)
    solution: str = ""
    """A right answer, for demonstrations."""


class PythonCode:
    """Programming problems with hidden tests."""

    def __init__(self, config: PythonCodeConfig, seed: int) -> None:
        self.name = config.name
        self._config = config
        where = f"environments.{config.name}.file"
        file = BUILT_IN if config.file is None else config.file
        problems = read_problems(file, CodeProblem, where)
        for problem in problems:
            for test in problem.tests:
                if len((test.stdout or test.expected or "").encode()) > config.output_bytes:
                    raise ConfigError(
                        f"environments.{config.name}.output_bytes: is {config.output_bytes}, and a test of "
                        f"{problem.question[:60]!r} expects more"
                    )
        self._split = ProblemSplit(problems, config.evaluation_task_count, seed, config.name)

    def task(self, split: Split, index: int) -> Task:
        return self._split.task(split, index)

    def prompt(self, task: Task) -> str:
        return self._question(self._split[task.payload["number"]])

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        problem = self._split[task.payload["number"]]
        sources = [program_of(completion.text) if completion.stopped else None for completion in completions]
        different = [source for source in dict.fromkeys(sources) if source is not None]
        judged = await asyncio.gather(*(self._judge(problem, source, tools) for source in different))
        scores = dict(zip(different, judged, strict=True))
        return [Score(0.0, False, "no end token") if source is None else scores[source] for source in sources]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        if validation:  # there is no single right program
            return None
        problem = self._split[self._split.training(f"demonstration/{index}")]
        return (self._question(problem), problem.solution) if problem.solution else None

    def _question(self, problem: CodeProblem) -> str:
        return f"{self._config.before}{problem.question}{self._config.after}"

    async def _judge(self, problem: CodeProblem, source: str, tools: Tools) -> Score:
        config = self._config
        inputs = [{"call": test.call} if test.call else {"stdin": test.stdin or ""} for test in problem.tests]
        request = {
            "source": source,
            "tests": inputs,
            "cpu_s": config.test_cpu_s,
            "wall_s": config.test_wall_s,
            "memory_bytes": config.test_memory_bytes,
            "output_bytes": config.output_bytes,
        }
        limits = SandboxLimits(wall_s=config.sandbox_wall_s, cpu_s=config.sandbox_wall_s)
        result = await tools.run_python(_harness(), json.dumps(request).encode(), limits)
        if result.outcome in ("not_started", "cancelled", "expired"):
            raise RuntimeError(f"the sandbox did not run the tests: {result.outcome} {result.message}")
        outcomes = [
            _outcome(test, line) for test, line in zip(problem.tests, _lines(result.stdout, inputs), strict=True)
        ]
        passed, count = outcomes.count("passed"), len(outcomes)
        wrong = next((f"; test {n}: {o}" for n, o in enumerate(outcomes, start=1) if o != "passed"), "")
        reward = passed / count if config.partial_credit else float(passed == count)
        return Score(reward, passed == count, f"{passed} of {count} tests{wrong}")


def program_of(text: str) -> str:
    """The last fenced block of an answer, or all of it."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def same(found: Any, wanted: Any) -> bool:
    """Whether two encoded values are equal; a number by its value."""
    if type(wanted) in (int, float) and type(found) in (int, float) and float in (type(wanted), type(found)):
        try:
            return math.isclose(found, wanted, rel_tol=CLOSE, abs_tol=CLOSE)
        except OverflowError:  # an integer beyond all floating-point numbers
            return False
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same_parts(kind, found[kind], wanted[kind]) for kind in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(same(f, w) for f, w in zip(found, wanted, strict=True))
    return found == wanted


def _same_parts(kind: str, found: Any, wanted: Any) -> bool:
    if kind == "dict" and isinstance(found, list):  # in any order
        return same(sorted(found, key=json.dumps), sorted(wanted, key=json.dumps))
    return same(found, wanted)


def _outcome(test: CodeTest, line: dict[str, Any] | None) -> str:
    if line is None:
        return "not run"
    output = str(line.get("output"))
    if line.get("outcome") != "ended":
        return str(line.get("outcome"))
    if test.expected is None:
        return "passed" if _trimmed(output) == _trimmed(test.stdout or "") else "another output"
    try:
        found = json.loads(output)
        return "passed" if same(found, encoded(ast.literal_eval(test.expected))) else "another value"
    except (ValueError, RecursionError):
        return "no value"


def _trimmed(text: str) -> str:
    """Without spaces at the ends of lines and of the text."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def _lines(stdout: bytes, tests: Sequence[Any]) -> list[dict[str, Any] | None]:
    """The harness's line of each test."""
    found: list[dict[str, Any] | None] = [None] * len(tests)
    for line in stdout.splitlines():
        try:
            verdict = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a line that the output limit cut
        number = verdict.get("test") if isinstance(verdict, dict) else None
        if isinstance(number, int) and 0 <= number < len(found):
            found[number] = verdict
    return found


@cache
def _harness() -> str:
    return Path(__file__).with_name("code_harness.py").read_text(encoding="utf-8")
