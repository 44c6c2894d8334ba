"""Sections of environments that other libraries bring. Imports none of them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.common.imports import PATH_PATTERN
from slipstream.environments.base import MAX_REWARD
from slipstream.environments.config_base import BaseEnvironmentConfig

NAME_PATTERN = r"^[A-Za-z0-9_.-]+$"


class AdapterConfig(BaseEnvironmentConfig):
    """What adapters have in common: their environments bring no demonstrations."""

    demonstration_weight: float = Field(default=0.0, ge=0, le=0)
    """They bring no demonstrations: 0."""

    correct_at: float = 1.0
    """Reward from which accuracy counts a rollout as right."""


class VerifiersConfig(AdapterConfig):
    """An environment of verifiers, unchanged: its loop, its tools and its rubric. Needs the extra `verifiers`."""

    type: Literal["verifiers"] = "verifiers"
    name: str = Field(default="verifiers", pattern=NAME_PATTERN)
    max_new_tokens: int = Field(default=256, ge=1)

    id: str = ""
    """Name of an installed environment, as `verifiers.load_environment` takes it."""

    path: str = ""
    """Instead of `id`: `package.module:function` that returns the environment, such as a `load_environment`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that function."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.id) == bool(self.path):
            raise ValueError("id: give either it or path")
        return self


class TextArenaConfig(AdapterConfig):
    """A game of textarena, for one player or several, all played by the model. Needs the extra `textarena`."""

    type: Literal["textarena"] = "textarena"
    name: str = Field(default="textarena", pattern=NAME_PATTERN)
    max_new_tokens: int = Field(default=64, ge=1)

    game: str = Field(min_length=1)
    """Its name there, such as "GuessTheNumber-v0"."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the game, such as `max_number`."""

    players: int = Field(default=1, ge=1, le=15)
    """Players of a game. With several, each is a role, `player-0` and so on, with the game's reward for it."""

    opponent: str = Field(default="", pattern=r"^$|" + PATH_PATTERN)
    """`package.module:function` that plays all players but one, who changes with the game's number: called with (what
    the player was told since its last turn, a `random.Random`), it returns what the player says. Empty: the model plays
    all of them."""

    opponent_plays: Literal["held_out", "all"] = "held_out"
    """In which games: where the model is evaluated only, or in training, too."""

    cut_reward: float = Field(default=-1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """What a player earns whose turn is cut off at `max_new_tokens`, which ends the game, who is to move when the
    conversation is full, or whose game is not over at a limit of the rollout's: no more than what an illegal move
    costs, or talking on would pay. -1 is the lowest reward of textarena's games."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.opponent and self.players == 1:
            raise ValueError("opponent: a game for one player has none; say how many players there are")
        return self


class OpenEnvConfig(AdapterConfig):
    """An environment behind an OpenEnv server, an episode a session. Needs the extra `openenv`."""

    type: Literal["openenv"] = "openenv"
    name: str = Field(default="openenv", pattern=NAME_PATTERN)
    max_new_tokens: int = Field(default=256, ge=1)

    url: str = Field(pattern=r"^(https?|wss?)://.+")
    """Where the server listens, such as "http://127.0.0.1:8000"."""

    action: str = "message"
    """Field of the action that the model's text goes into. Empty: the text itself is the action, as a JSON object."""

    observation: str = ""
    """Field of the observation that the model is shown. Empty: all of it, as JSON."""

    before: str = ""
    """Text before the first observation: what is to be done."""

    rewards: Literal["sum", "last"] = "sum"
    """What a rollout is worth: all rewards of its steps together, or that of the last."""

    reset: dict[str, Any] = Field(default_factory=dict)
    """What `reset` is given beside the seed, which is the task's number."""
