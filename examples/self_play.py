"""A game that the model learns by playing it against itself: take 1, 2 or 3 stones; who takes the last one wins.

PYTHONPATH=examples:$PYTHONPATH slipstream rl @ examples/self-play.toml

Whoever faces a multiple of four stones loses against a perfect player. Held-out games are against players that are no
model: one that makes no mistake, or, with `options.opponent = "random"`, one that draws its moves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from slipstream.environments.base import Limits, RoleScores, Score, Split, Task, Turn
from slipstream.environments.config import ImportedConfig
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

MOST = 3
"""Stones that a move may take."""
STONES = range(5, 10)
"""At the beginning of a game: a digit says how many are left."""


def stones_of(move: str) -> int:
    """How many stones a move takes: every character is one, or a random model would make none."""
    return 1 + ord(move[:1] or " ") % MOST


class Stones:
    """Games by number; the rollouts of a group begin with the same stones."""

    roles = ("first", "second")
    limits = Limits(max_turns=10, ends_when_cut=False)  # a move is a token, and needs no end
    needs_sandbox = False

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._seed = seed
        self._perfect = config.options.get("opponent") != "random"

    def task(self, split: Split, index: int) -> Task:
        draw = random.Random(f"{self._seed}/{split}/{index}")
        if split == "train":
            return Task(split, index, {"stones": draw.choice(STONES)})
        # The model's side of a held-out game changes from one to the next; it can win each of them.
        side = index % 2
        stones = [count for count in STONES if bool(count % (MOST + 1)) != bool(side)]
        return Task(split, index, {"stones": draw.choice(stones), "side": side, "draw": index})

    async def setup(self, task: Task, tools: Tools) -> Game:
        draw = random.Random(f"{self._seed}/moves/{task.payload.get('draw')}")
        return Game(task.payload["stones"], task.payload.get("side"), draw, perfect=self._perfect)


class Game:
    """One game."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, stones: int, side: int | None, draw: random.Random, *, perfect: bool) -> None:
        """`side`: the only one that the model plays, from 0; None is both."""
        self._stones = stones
        self._side = side
        self._draw = draw
        self._perfect = perfect
        self._moved: list[str] = []
        self._to_move = 0
        if side == 1:
            self._opponent_moves()
        self.role = Stones.roles[self._to_move]
        self.messages = [Message("user", str(self._stones))]

    async def step(self, message: Message) -> Sequence[Message] | Turn:
        self._take(stones_of(message.content))
        if self._side is not None and self._stones:
            self._opponent_moves()
        if not self._stones:
            return []
        return Turn(Stones.roles[self._to_move], [Message("user", str(self._stones))])

    async def score(self) -> RoleScores:
        """Whoever moved last took the last stone; a game that is not over has no winner."""
        winner = None if self._stones else 1 - self._to_move
        scores = {role: Score(float(side == winner), side == winner) for side, role in enumerate(Stones.roles)}
        return RoleScores(scores, detail=" ".join(self._moved))

    async def close(self) -> None:
        return

    def _take(self, count: int) -> None:
        self._moved.append(f"{self._stones}-{min(count, self._stones)}")
        self._stones -= min(count, self._stones)
        self._to_move = 1 - self._to_move

    def _opponent_moves(self) -> None:
        best = self._stones % (MOST + 1)
        drawn = self._draw.randint(1, MOST)
        self._take(best if self._perfect and best else drawn)
