"""Single-player games of textarena (https://github.com/LeonGuertler/TextArena), a game a rollout.

The seed of a game is its task's number, so the rollouts of a group play the same one. The reward is the game's.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import suggest
from slipstream.environments.base import Context, Score, Split, Task
from slipstream.environments.config_adapters import TextArenaConfig
from slipstream.environments.limits import Limits
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

RAW = "-raw"
"""What textarena adds to a game's name for observations that are not wrapped: only what is new, one by one."""
OWN_ACTION = textarena.ObservationType.PLAYER_ACTION


class TextArena:
    """One game."""

    needs_sandbox = False

    def __init__(self, config: TextArenaConfig, seed: int) -> None:
        self.name = config.name
        self.limits = Limits(max_turns=100)
        self._config = config
        self._seed = seed
        self._game_id = f"{config.game.removesuffix(RAW)}{RAW}"
        where = f"environments.{config.name}"
        if self._game_id not in ENV_REGISTRY:
            names = [name.removesuffix(RAW) for name in ENV_REGISTRY if name.endswith(RAW)]
            near = suggest(difflib.get_close_matches(config.game, names, n=1))
            raise ConfigError(f"{where}: textarena has no game {config.game!r}{near}")
        try:
            self._begin(0)
        except (AssertionError, ImportError, LookupError, SyntaxError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: textarena cannot begin {config.game} for one player: {error}") from error

    def task(self, split: Split, index: int) -> Task:
        # Games by number: held-out ones first, training games from the rest.
        held_out = self._config.evaluation_task_count
        number = index % max(1, held_out) if split == "held_out" else held_out + index
        return Task(split, index, {"game": number})

    async def setup(self, task: Task, tools: Tools) -> TextArenaEpisode:
        return TextArenaEpisode(self._begin(task.payload["game"]), self._config.correct_at)

    def _begin(self, number: int) -> Any:
        game = textarena.make(self._game_id, **self._config.options)
        game.reset(num_players=1, seed=self._seed * 1_000_003 + number)
        return game


class TextArenaEpisode:
    """One game until it is over."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, game: Any, correct_at: float) -> None:
        self._game = game
        self._correct_at = correct_at
        self._over = False
        self.messages = [Message("user", self._told())]

    async def step(self, message: Message) -> Sequence[Message] | Context:
        self._over, _ = self._game.step(message.content)
        return [] if self._over else [Message("user", self._told())]

    async def score(self) -> Score:
        rewards, info = self._game.close()
        reward = float((rewards or {}).get(0, 0.0)) if self._over else 0.0
        reason = str((info or {}).get(0, {}).get("reason", "")) if self._over else "the game was not over"
        return Score(reward, self._over and reward >= self._correct_at, reason)

    async def close(self) -> None:
        return None

    def _told(self) -> str:
        """What is new, but for what the model itself said."""
        _, observations = self._game.get_observation()
        return "\n".join(text for _, text, kind in observations if kind != OWN_ACTION) or "Your turn."
