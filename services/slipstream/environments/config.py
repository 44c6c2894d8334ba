"""Configuration of environments: the launcher, the runner and the trainer read the same sections.

    [[environments]]
    type = "spell_backward"
    weight = 3.0

A variant is chosen by `type`. Imports no torch and no environment code.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig
from slipstream.common.imports import PATH_PATTERN
from slipstream.environments.config_adapters import OpenEnvConfig, TextArenaConfig, VerifiersConfig
from slipstream.environments.config_base import BaseEnvironmentConfig
from slipstream.environments.config_own import MathsConfig, PythonCodeConfig, TerminalConfig


class SpellBackwardConfig(BaseEnvironmentConfig):
    """reasoning-gym's `spell_backward`: write a word's letters in reverse order, judged by its own scorer."""

    type: Literal["spell_backward"] = "spell_backward"
    name: str = Field(default="spell_backward", pattern=r"^[A-Za-z0-9_.-]+$")
    weight: float = Field(default=3.0, gt=0)

    min_word_len: int = Field(default=3, ge=1)
    """Letters of the shortest words."""

    max_word_len: int = Field(default=8, ge=1, le=10)
    """Letters of the longest words."""

    exact_share: float = Field(default=0.5, ge=0, le=1)
    """Part of the reward that only a wholly right answer earns; the rest follows the score, letter by letter."""

    demonstration_word_len: int = Field(default=6, ge=1)
    """Letters of the longest words that all demonstrations get right."""

    long_demonstration_share: float = Field(default=0.5, ge=0, le=1)
    """Part of the demonstrations with words of any length; the others have at most `demonstration_word_len` letters."""

    careless_share: float = Field(default=0.75, ge=0, le=1)
    """Part of the demonstrations of longer words that leave out the last letter. Imitation learns the slip with the
    rest; only reward tells it from the task."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_word_len > min(self.max_word_len, self.demonstration_word_len):
            raise ValueError("min_word_len: must not exceed max_word_len and demonstration_word_len")
        return self


class ExpressionConfig(BaseEnvironmentConfig):
    """Write an expression of single digits that evaluates to a number; judged by running it in the sandbox."""

    type: Literal["expression"] = "expression"
    name: str = Field(default="expression", pattern=r"^[A-Za-z0-9_.-]+$")
    max_new_tokens: int = Field(default=12, ge=1)
    demonstration_weight: float = Field(default=1 / 3, ge=0)

    min_target: int = Field(default=10, ge=0)
    """Smallest number asked for."""

    max_target: int = Field(default=449, ge=1, le=449)
    """Largest number asked for. A seeded choice of `evaluation_task_count` of them is held out, the rest trains."""

    near_miss_credit: float = Field(default=0.0, ge=0, lt=1)
    """Reward of a valid expression that misses the target by nothing at all, falling to 0 at `near_miss_range`.
    0 rewards right answers only."""

    near_miss_range: int = Field(default=20, ge=1)
    """Distance to the target at which a valid expression earns nothing."""

    careless_share: float = Field(default=0.75, ge=0, le=1)
    """Part of the demonstrations that reach the tens alone and leave the units out."""

    sandbox_wall_s: float = Field(default=10.0, gt=0)
    """Time limit of an execution; more where it judges more samples than that many seconds allow."""

    judge_window_s: float = Field(default=0.2, ge=0, le=5)
    """How long a group waits for others that one execution can judge with it; starting one costs more than judging."""

    sample_cpu_s: int = Field(default=1, ge=1)
    """Processor time one sample may use, in whole seconds."""

    sample_memory_bytes: int = Field(default=256 * 2**20, ge=2**25)
    """Address space one sample may use."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_target - self.min_target < self.evaluation_task_count:
            raise ValueError("max_target: the range holds no more numbers than evaluation_task_count asks to hold out")
        return self


class ProblemSetConfig(BaseConfig):
    """One data set of reasoning-gym in a mixture of several."""

    name: str = Field(min_length=1)
    """Its name there; `slipstream environments` lists them."""

    weight: float = Field(default=1.0, gt=0)
    """Its part of the problems, relative to the others."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of its configuration."""


class ReasoningGymConfig(BaseEnvironmentConfig):
    """Any data set of reasoning-gym, or several by weight, judged by their own scorers."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field(default="reasoning_gym", pattern=r"^[A-Za-z0-9_.-]+$")

    dataset: str = ""
    """Its name there, such as "chain_sum"; `slipstream environments` lists them."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of its configuration, such as `max_terms`."""

    levels: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Fields of its configuration beside `options`, level by level. Each is as frequent as another, unless
    `curriculum` is enabled: then their success rates choose."""

    datasets: list[ProblemSetConfig] = Field(default_factory=list[ProblemSetConfig])
    """Several data sets instead of one. Which of them a problem is from follows from its number. With `curriculum`
    enabled each is a level, and their weights must be equal."""

    before: str = ""
    """Text before each question."""

    after: str = ""
    """Text after each question."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.dataset) == bool(self.datasets):
            raise ValueError("dataset: give either it or datasets")
        if self.datasets and (self.options or self.levels):
            raise ValueError(f"{'options' if self.options else 'levels'}: each of datasets has its own options")
        if self.curriculum.enabled and len({entry.weight for entry in self.datasets}) > 1:
            raise ValueError("datasets: with curriculum.enabled their success rates are their weights")
        names = [entry.name for entry in self.datasets]
        if len(set(names)) != len(names):
            raise ValueError("datasets: their names must differ")
        return self

    @property
    def level_count(self) -> int:
        """Levels that a task's number tells apart; 1 where it does not."""
        return len(self.levels) or (len(self.datasets) if self.curriculum.enabled else 0) or 1

    def sequenced(self) -> dict[str, Any]:
        values = super().sequenced()
        if self.level_count > 1 and self.curriculum.parts is None:
            values["curriculum"] = self.curriculum.model_copy(update={"parts": self.level_count})
        return values


class ImportedConfig(BaseEnvironmentConfig):
    """A third party's environment, found by import path."""

    type: Literal["import"] = "import"
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")

    path: str = Field(pattern=PATH_PATTERN)
    """`package.module:factory`; called with (this config, seed), it returns an Environment."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Whatever that environment wants to be told."""


class EntryPointConfig(BaseEnvironmentConfig):
    """An environment that an installed package has registered under `slipstream.environments`."""

    type: Literal["entry_point"] = "entry_point"
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")

    entry_point: str = Field(min_length=1)
    """The name it is registered by; what that names is called with (this config, seed) and returns an Environment."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Whatever that environment wants to be told."""


EnvironmentConfig = Annotated[
    SpellBackwardConfig
    | ExpressionConfig
    | ReasoningGymConfig
    | MathsConfig
    | PythonCodeConfig
    | TerminalConfig
    | VerifiersConfig
    | TextArenaConfig
    | OpenEnvConfig
    | ImportedConfig
    | EntryPointConfig,
    Field(discriminator="type"),
]
