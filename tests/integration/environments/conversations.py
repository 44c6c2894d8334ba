"""Plays an episode as the runner does, with a script in place of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.environments.base import Context, Episode, EpisodeEnvironment, RoleScores, Score, Split, Turn
from slipstream.environments.limits import Cut
from slipstream.environments.messages import Message, ToolCall
from slipstream.environments.tools import Tools


def cut_short(episode: Episode, why: Cut) -> None:
    """Tell an episode that a limit ended it, if it wants to know."""
    tell = getattr(episode, "cut_short", None)
    if tell is not None:
        tell(why)


Says = Callable[[Sequence[Message]], Message]
"""The model: from a conversation to its next message."""


@dataclass
class Played:
    """A rollout that has ended."""

    history: list[Message]
    score: Score
    contexts: int = 0
    """How often the conversation was begun anew."""
    shown_tools: list[Any] = field(default_factory=list[Any])


def says(*texts: str) -> Says:
    """A model that says these one after the other, and the last one for good."""
    left = list(texts)
    return lambda history: Message("assistant", left.pop(0) if len(left) > 1 else left[0])


def calls(*asked: tuple[str, dict[str, Any]]) -> Says:
    """A model that calls these tools one after the other, and then says that it is done."""
    left = list(asked)

    def next_message(history: Sequence[Message]) -> Message:
        if not left:
            return Message("assistant", "done")
        name, arguments = left.pop(0)
        return Message("assistant", "", (ToolCall(name, arguments, f"call-{len(history)}"),))

    return next_message


async def play(
    environment: EpisodeEnvironment,
    model: Says,
    *,
    index: int = 0,
    split: Split = "train",
    tools: Tools | None = None,
    max_turns: int | None = None,
    cut: Cut = "turns",
) -> Played:
    """One rollout, from its first messages to its score. `cut`: what ends it after `max_turns`."""
    episode = await environment.setup(environment.task(split, index), tools or Tools(None))
    try:
        history = list(episode.messages)
        played = Played(history, Score(0.0, False), shown_tools=list(episode.tools))
        for _ in range(max_turns or environment.limits.max_turns):
            said = model(history)
            history.append(said)
            answered = await episode.step(said)
            assert not isinstance(answered, Turn), "`play_roles` plays games of several roles"
            if isinstance(answered, Context):
                history[:] = answered.messages
                played.contexts += 1
            elif not answered:
                break
            else:
                history += answered
        else:
            cut_short(episode, cut)
        score = await episode.score()
        assert isinstance(score, Score)
        played.score = score
        return played
    finally:
        await episode.close()


@dataclass
class PlayedRoles:
    """A rollout of several roles that has ended."""

    histories: dict[str, list[Message]]
    score: RoleScores
    order: list[str]
    """Whose turn it was, one after the other."""


async def play_roles(
    environment: EpisodeEnvironment,
    models: Mapping[str, Says],
    *,
    index: int = 0,
    split: Split = "train",
    max_turns: int | None = None,
    cut: Cut = "turns",
) -> PlayedRoles:
    """The same with a script for each role."""
    episode = await environment.setup(environment.task(split, index), Tools(None))
    try:
        role = str(getattr(episode, "role", ""))
        histories = {role: list(episode.messages)}
        order: list[str] = []
        for _ in range(max_turns or environment.limits.max_turns):
            order.append(role)
            said = models[role](histories[role])
            histories[role].append(said)
            answered = await episode.step(said)
            if not answered:
                break
            assert isinstance(answered, Turn)
            role = answered.role
            histories.setdefault(role, []).extend(answered.messages)
        else:
            cut_short(episode, cut)
        score = await episode.score()
        assert isinstance(score, RoleScores)
        return PlayedRoles(histories, score, order)
    finally:
        await episode.close()
