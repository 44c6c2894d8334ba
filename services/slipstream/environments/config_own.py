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
