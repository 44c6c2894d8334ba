"""The environment protocol: tasks, prompts or episodes, scores and demonstrations.

There are two kinds. An `Environment` shows a prompt and judges the answers of a group. An `EpisodeEnvironment` sets up
an episode for each rollout, which answers the model turn by turn, with tools if it has any, and is scored at its end.
Both are pure functions of configuration and seed, but for what `score` and episodes do through their tools.
Third parties implement one of them and name a factory by import path (`type = "import"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slipstream.environments.limits import Limits
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

if TYPE_CHECKING:
    from typing_extensions import TypeIs

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


@dataclass(frozen=True)
class RoleScores:
    """What one rollout is worth for each role that the model played in it.

    The rollout's own reward is the mean over the roles that train.
    """

    scores: Mapping[str, Score]
    """By role: one for each that took a turn, at least."""

    correct: bool | None = None
    """What accuracy counts of the whole rollout. None: whether all roles that took a turn and train are right."""

    detail: str = ""
    """For people: why."""


class Environment(Protocol):
    """A set of tasks with a judge of single answers.

    Tasks of the held-out split never appear in training or demonstrations.
    """

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


@dataclass(frozen=True)
class Context:
    """A whole conversation that the model is to go on from, instead of more messages in the present one.

    With the history cut short or told anew it is a compaction, with another system message a sub-agent. It begins
    another training sample of the same rollout, with the same reward; what it shares with an earlier one is trained
    only there. A context that goes on from an earlier one extends that: so a sub-agent's caller gets its answer.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] | None = None
    """None: the episode's."""

    role: str = ""
    """Where the environment has roles, whose it is. Empty: that of the turn before."""


@dataclass(frozen=True)
class Turn:
    """The next turn is that of a role, whose conversation goes on with these messages, or begins with them.

    Roles are players, or agents: each has a conversation of its own, in which the model never sees another's but for
    what the environment tells it, and training samples of its own, with the reward of that role.
    """

    role: str
    """One of the environment's `roles`."""

    messages: Sequence[Message]
    """What is new for that role since its last turn; not empty."""


class Episode(Protocol):
    """One rollout from its first messages to its score. Its calls come one at a time; other episodes run meanwhile.

    One that is to know that it was ended before its end also has `cut_short(why: Cut) -> None`, called before `score`.
    """

    @property
    def messages(self) -> Sequence[Message]:
        """What the model is shown first."""
        ...

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """What it may call. Calls of other tools, and malformed ones, are answered without the episode."""
        ...

    async def step(self, message: Message) -> Sequence[Message] | Context | Turn:
        """Take the model's message, with its tool calls parsed, and answer it; nothing ends the episode.

        Messages go on in the conversation of the turn before; a `Turn` is for another role, or for the same. It is
        called for each message. After the last that `Limits` allow, which one that was cut off may be, no further one
        comes, whatever this answers. What it raises ends this rollout alone.
        """
        ...

    async def score(self) -> Score | RoleScores:
        """What the rollout is worth; asked once, after the last step. With roles, what it is worth for each."""
        ...

    async def close(self) -> None:
        """Give back what it holds; called once, however the rollout ended."""
        ...


class EpisodeEnvironment(Protocol):
    """A set of tasks that take several turns. Tasks of the held-out split never appear in training.

    One with several roles also has `roles`, their names (`roles.py`), and each of its episodes may have `role`: whose
    the first turn is, where that is not the first of them.
    """

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether it cannot do without `sandbox_address`."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """As `Environment.task`."""
        ...

    async def setup(self, task: Task, tools: Tools) -> Episode:
        """Begin an episode; one for each rollout of a group. Rollouts with equal first messages share a request."""
        ...


AnyEnvironment = Environment | EpisodeEnvironment


def takes_turns(environment: AnyEnvironment) -> TypeIs[EpisodeEnvironment]:
    """Whether it is of the kind with episodes."""
    return hasattr(environment, "setup") and not hasattr(environment, "prompt")
