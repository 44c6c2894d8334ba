"""The environment protocol: tasks, prompts, scores and demonstrations.

An environment is a pure function of configuration and seed, except for `score`, which may run code through its tools.
Third parties implement `Environment` and name a factory by import path (`type = "import"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slipstream.environments.tools import Tools

MAX_REWARD = 1e30
"""Rewards beyond lose their spread: its square is not finite."""

Split = Literal["train", "held_out"]

Turns = Literal["all", "last"]
"""Turns of the assistant in a conversation."""


@dataclass(frozen=True)
class Task:
    """One problem."""

    split: Split
    index: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What prompt and scorer need, as plain values."""


@dataclass(frozen=True)
class Completion:
    """What the model answered."""

    text: str
    """Without the end token."""

    stopped: bool
    """It drew the end token; otherwise it was cut at the length limit."""


@dataclass(frozen=True)
class Score:
    """What one completion is worth."""

    reward: float
    """What training maximises."""

    correct: bool
    """What accuracy counts."""

    detail: str = ""
    """For people: why."""


class Environment(Protocol):
    """A set of tasks with a judge. Tasks of the held-out split never appear in training or demonstrations."""

    @property
    def name(self) -> str: ...

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, from 0. The training split is endless, the held-out one repeats after its last task."""
        ...

    def prompt(self, task: Task) -> str: ...

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        """Judge all completions of a group; one score each, in order. What it raises fails the group."""
        ...

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str] | None:
        """Prompt and answer for supervised warm-up. Validation ones have one right answer and are in no batch.

        None where the environment has none to show.
        """
        ...
