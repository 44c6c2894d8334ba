"""Games of textarena (https://github.com/LeonGuertler/TextArena), a game a rollout.

The seed of a game is its task's number, so the rollouts of a group play the same one. The rewards are the game's. With
several players each is a role: the model plays all of them, or one against an opponent that is no model.

A turn that was cut off is no move, whatever it begins with: it ends the game, and earns whoever spoke `cut_reward`. So
does a conversation that is full, whoever was to move, and a limit of the rollout's, all players: a game that comes to
no end must not pay more than one that is lost.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Sequence
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from slipstream.common.config import ConfigError
from slipstream.common.config_errors import suggest
from slipstream.common.imports import import_callable
from slipstream.environments.base import Context, RoleScores, Score, Split, Task, Turn
from slipstream.environments.config_adapters import TextArenaConfig
from slipstream.environments.limits import Cut, Limits
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

RAW = "-raw"
"""What textarena adds to a game's name for observations that are not wrapped: only what is new, one by one."""
OWN_ACTION = textarena.ObservationType.PLAYER_ACTION
MAX_OPPONENT_MOVES = 1000
"""Between two turns of the model's: a game that asks its opponent for more goes round in circles."""

CUT_SENTENCES: dict[Cut, str] = {
    "turn": "the turn was cut off at its limit of tokens",
    "context": "the conversation left no room for another turn",
    "turns": "the game was not over after max_turns",
    "tokens": "the game was not over after max_rollout_tokens",
}

Opponent = Callable[[str, random.Random], str]


def role_of(player: int) -> str:
    """What a player is called."""
    return f"player-{player}"


class TextArena:
    """One game."""

    needs_sandbox = False

    def __init__(self, config: TextArenaConfig, seed: int) -> None:
        self.name = config.name
        self.limits = Limits(max_turns=100)
        self.roles = tuple(map(role_of, range(config.players))) if config.players > 1 else ()
        self._config = config
        self._seed = seed
        self._game_id = f"{config.game.removesuffix(RAW)}{RAW}"
        where = f"environments.{config.name}"
        if self._game_id not in ENV_REGISTRY:
            names = [name.removesuffix(RAW) for name in ENV_REGISTRY if name.endswith(RAW)]
            near = suggest(difflib.get_close_matches(config.game, names, n=1))
            raise ConfigError(f"{where}: textarena has no game {config.game!r}{near}")
        self._opponent: Opponent | None = None
        if config.opponent:
            self._opponent = import_callable(config.opponent, f"{where}.opponent")
        try:
            self._begin(0)
        except (AssertionError, ImportError, LookupError, SyntaxError, TypeError, ValueError) as error:
            whom = "one player" if config.players == 1 else f"{config.players} players"
            raise ConfigError(f"{where}: textarena cannot begin {config.game} for {whom}: {error}") from error

    def task(self, split: Split, index: int) -> Task:
        # Games by number: held-out ones first, training games from the rest.
        held_out = self._config.evaluation_task_count
        number = index % max(1, held_out) if split == "held_out" else held_out + index
        return Task(split, index, {"game": number})

    async def setup(self, task: Task, tools: Tools) -> TextArenaEpisode:
        number = task.payload["game"]
        played = range(self._config.players)
        if self._opponent is not None and (task.split == "held_out" or self._config.opponent_plays == "all"):
            played = [number % self._config.players]
        draw = random.Random(f"{self._seed}/{number}")
        return TextArenaEpisode(self._begin(number), self._config, played, self._opponent, draw)

    def _begin(self, number: int) -> Any:
        game = textarena.make(self._game_id, **self._config.options)
        game.reset(num_players=self._config.players, seed=self._seed * 1_000_003 + number)
        return game


class TextArenaEpisode:
    """One game until it is over."""

    tools: Sequence[ToolSpec] = ()

    def __init__(
        self,
        game: Any,
        config: TextArenaConfig,
        played: Sequence[int],
        opponent: Opponent | None,
        draw: random.Random,
    ) -> None:
        """`played`: the players that the model plays; `opponent` plays the others."""
        self._game = game
        self._correct_at = config.correct_at
        self._cut_reward = config.cut_reward
        self._several = config.players > 1
        self._played = played
        self._opponent = opponent
        self._draw = draw
        self._over = False
        self._cut: Sequence[int] = ()  # players for whom it ended before its end
        self._why: Cut = "turn"
        self._player, told = self._next()
        if told is None:
            raise ValueError("the game was over before the model had a turn")
        self.role = role_of(self._player) if self._several else ""
        self.messages = [Message("user", told)]

    async def step(self, message: Message) -> Sequence[Message] | Context | Turn:
        if not message.stopped:
            self.cut_short("turn")
            return []
        self._over, _ = self._game.step(message.content)
        self._player, told = self._next()
        if told is None:
            return []
        said = [Message("user", told)]
        return Turn(role_of(self._player), said) if self._several else said

    def cut_short(self, why: Cut) -> None:
        """Its next turn does not come."""
        if not self._over and not self._cut:
            self._why, self._cut = why, [self._player] if why in ("turn", "context") else self._players

    async def score(self) -> Score | RoleScores:
        rewards, info = self._game.close() if self._over else ({}, {})
        scores = {player: self._score_of(player, rewards or {}, info or {}) for player in self._players}
        if self._several:
            return RoleScores({role_of(player): score for player, score in scores.items()})
        return scores[0]

    async def close(self) -> None:
        return None

    @property
    def _players(self) -> Sequence[int]:
        return self._played if self._several else [0]

    def _score_of(self, player: int, rewards: dict[int, float], info: dict[int, Any]) -> Score:
        if player in self._cut:
            return Score(self._cut_reward, False, CUT_SENTENCES[self._why])
        reward = float(rewards.get(player, 0.0))
        reason = str(info.get(player, {}).get("reason", "")) if self._over else "the game was not over"
        return Score(reward, self._over and reward >= self._correct_at, reason)

    def _next(self) -> tuple[int, str | None]:
        """Who of the model's players is next, and what it is told; nothing where the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            if self._over:
                break
            player, told = self._told()
            if player in self._played or self._opponent is None:
                return player, told
            self._over, _ = self._game.step(self._opponent(told, self._draw))
        else:
            raise ValueError(f"the opponent had {MAX_OPPONENT_MOVES} turns, and the model none")
        return 0, None

    def _told(self) -> tuple[int, str]:
        """Whose turn it is, and what is new to that player, but for what it said itself."""
        player, observations = self._game.get_observation()
        news = [
            f"[{role_of(sender)}] {text}" if self._several and sender >= 0 else text
            for sender, text, kind in observations
            if kind != OWN_ACTION or (self._several and sender != player)
        ]
        return player, "\n".join(news) or "Your turn."
