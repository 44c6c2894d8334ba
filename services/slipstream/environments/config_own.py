"""Sections of the product's own environments beside those of the demo. Imports no torch and no environment code."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from slipstream.environments.config_base import BaseEnvironmentConfig

NAME_PATTERN = r"^[A-Za-z0-9_.-]+$"


class MathsConfig(BaseEnvironmentConfig):
    """Problems of mathematics with one right answer each, judged by math-verify."""

    type: Literal["maths"] = "maths"
    name: str = Field(default="maths", pattern=NAME_PATTERN)

    file: Path | None = None
    """JSONL of `{"question": ..., "answer": ...}`, the answer as LaTeX or a number; of one with `####`, what comes
    after. Unset: fractions, equations and remainders that are made up."""

    max_number: int = Field(default=9, ge=3, le=10_000)
    """Largest number in made-up problems."""

    plain_numbers: bool = True
    """Where a number is asked for, one must be given: `1/3+1/4` is no answer to itself. false takes any expression of
    the same value."""

    before: str = ""
    """Text before each question."""

    after: str = ""
    """Text after each question."""

    answer_cpu_s: float = Field(default=2.0, gt=0)
    """Processor time that judging one answer may use."""

    answer_memory_bytes: int = Field(default=2**30, ge=2**28)
    """Address space that judging one answer may use."""

    judges: int = Field(default=2, ge=1, le=64)
    """Groups judged at once."""


class PythonCodeConfig(BaseEnvironmentConfig):
    """Write a Python program or function; judged by hidden tests in the sandbox."""

    type: Literal["python_code"] = "python_code"
    name: str = Field(default="python_code", pattern=NAME_PATTERN)
    max_new_tokens: int = Field(default=256, ge=1)
    evaluation_task_count: int = Field(default=8, ge=0)

    file: Path | None = None
    """JSONL of `{"question": ..., "tests": [...], "solution": ...}`; a test is `{"stdin": ..., "stdout": ...}` or
    `{"call": "f(2)", "expected": "4"}`. Unset: a small set that comes with the product."""

    partial_credit: bool = False
    """Reward the part of the tests that pass. false rewards a program that passes all of them."""

    before: str = ""
    """Text before each question."""

    after: str = ""
    """Text after each question."""

    test_cpu_s: float = Field(default=2.0, gt=0)
    """Processor time that a test may use; the first one that uses it up is the last one run."""

    test_wall_s: float = Field(default=10.0, gt=0)
    """Time that a test may take."""

    test_memory_bytes: int = Field(default=200 * 2**20, ge=2**25)
    """Address space that a test may use."""

    output_bytes: int = Field(default=16 * 2**10, ge=16)
    """Bytes of a test's output that are looked at."""

    sandbox_wall_s: float = Field(default=60.0, gt=0)
    """Time, and processor time, that all tests of a program may take."""


class TerminalConfig(BaseEnvironmentConfig):
    """A task at a shell in a sandbox of the rollout's own, over several turns; judged by check scripts."""

    type: Literal["terminal"] = "terminal"
    name: str = Field(default="terminal", pattern=NAME_PATTERN)
    max_new_tokens: int = Field(default=256, ge=1)
    evaluation_task_count: int = Field(default=3, ge=0)
    demonstration_weight: float = Field(default=0.0, ge=0, le=0)
    """It has no demonstrations: 0."""

    file: Path | None = None
    """JSONL of `{"question": ..., "files": {PATH: TEXT}, "checks": [COMMAND, ...]}`; a check that exits with 0 has
    passed. Unset: a small set that comes with the product."""

    partial_credit: bool = False
    """Reward the part of the checks that pass. false rewards a rollout that passes all of them."""

    before: str = ""
    """Text before each task."""

    after: str = ""
    """Text after each task."""

    command_wall_s: float = Field(default=10.0, gt=0)
    """Time, and processor time, that a command may take."""

    memory_bytes: int = Field(default=256 * 2**20, ge=2**26)
    """Memory that a command may use."""

    output_bytes: int = Field(default=4096, ge=64, le=2**20)
    """Bytes of a command's output that the model is shown."""

    state_bytes: int = Field(default=2 * 2**20, ge=2**12, le=8 * 2**20)
    """Bytes of the working directory, packed; what a command leaves beyond is lost."""

    max_calls: int = Field(default=8, ge=1)
    """Calls of one message that are run."""

    @property
    def sandbox_wall_s(self) -> float:
        """What the sandbox is asked for: starting and packing take time beside the command."""
        return self.command_wall_s + 10.0

    @property
    def sandbox_output_bytes(self) -> int:
        """The directory and the command's output, of which a byte may be six as JSON."""
        return self.state_bytes + 6 * self.output_bytes
