"""Episodes in the environment worker: the environment's side of rollouts that take turns, one episode a rollout.

| request | answer |
|---|---|
| `open` | the first prompt of each member of a group, or why it has none |
| `turn` | after a turn of the model: the next prompt, or that it is over |
| `end` | the score; the episode is closed |
| `abandon` | nothing; the episode is closed |

What an episode raises, and a call that takes longer than its limit, ends that episode alone: its answer has an `error`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from slipstream.common.errors import ContextTooLong, SandboxAway
from slipstream.environments.base import Context, Episode, EpisodeEnvironment, Limits, Score
from slipstream.environments.chat import Chat
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Sandbox, Tools
from slipstream.environments.transcript import Prompt, Transcript
from slipstream.runner.scores import score_as_json
from slipstream.runner.user_code import RAISED, away, given_up, told

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0
STEP_SHARE = 0.8
"""A step ends before the runner gives the whole worker up: this part of `environment_timeout_s`, at most."""

T = TypeVar("T")


@dataclass
class _Open:
    """An episode in progress."""

    environment: EpisodeEnvironment
    limits: Limits
    episode: Episode
    tools: Tools
    transcript: Transcript
    history: list[Message]
    """The present conversation."""
    shown_tools: tuple[ToolSpec, ...]
    turn_count: int = 0
    sampled_token_count: int = 0
    samples_of: list[int] = field(default_factory=list[int])
    """The sample of each turn."""
    call: asyncio.Task[Any] | None = None
    """What last called its code, and may still be at it."""


class EpisodeHost:
    """The open episodes of one environment worker."""

    def __init__(self, sandbox: Sandbox | None, max_call_s: float) -> None:
        """`max_call_s`: after so long the runner gives this process up."""
        self._sandbox = sandbox
        self._max_step_s = max_call_s * STEP_SHARE
        self._open: dict[int, _Open] = {}
        # A process that takes another's place never has its numbers: who asks for an episode of the dead one gets none.
        self._numbers = itertools.count(secrets.randbits(40) << 20)

    async def open(
        self, request: dict[str, Any], chat: Chat, context_tokens: int, environment: EpisodeEnvironment, limits: Limits
    ) -> dict[str, Any]:
        """The answer to `open`."""
        task = request["task"]
        found = environment.task(task["split"], task["index"])
        async with asyncio.TaskGroup() as group:
            members = [
                group.create_task(self._guard(self._begin(chat, context_tokens, environment, limits, found)))
                for _ in range(request["count"])
            ]
        return {
            "members": [member.result() for member in members],
            "stop_token_ids": chat.codec.stop_token_ids,
            "timeout_s": limits.timeout_s,
        }

    async def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to `turn`."""
        opened = self._open.get(request["episode"])
        if opened is None:
            return {"error": "the environment worker that ran this episode died"}
        opened.call = asyncio.current_task()
        return await self._guard(self._step(opened, request))

    async def end(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to `end`."""
        opened = self._open.get(request["episode"])
        if opened is None:
            return {"error": "the environment worker that ran this episode died"}
        opened.call = asyncio.current_task()
        reply = await self._guard(self._score(opened))
        await self.abandon(request)
        return {**reply, "sandbox_executions": opened.tools.sandbox_executions}

    async def abandon(self, request: dict[str, Any]) -> dict[str, Any]:
        """Close an episode, if it is open. A call that its code is still at ends first: nobody waits for its answer."""
        opened = self._open.pop(request["episode"], None)
        if opened is None:
            return {}
        call = opened.call
        if call is not None and not call.done() and call is not asyncio.current_task():
            call.cancel()
            await asyncio.wait([call], timeout=CLOSE_TIMEOUT_S)
        await self._close(opened.episode)
        return {}

    async def close(self) -> None:
        """Close all episodes: the process ends."""
        await asyncio.gather(*(self.abandon({"episode": number}) for number in self._open))

    async def _guard(self, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """User code runs in here: what it raises is its episode's end."""
        try:
            return await work
        except RAISED as error:
            if given_up(error):
                raise
            log.exception("episode_failed")
            return {"error": told(error), "away": away(error)}

    async def _within(self, limits: Limits, what: str, work: Awaitable[T], tools: Tools) -> T:
        limit_s = min(limits.step_timeout_s, self._max_step_s)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            if tools.sandbox_away:
                raise SandboxAway(f"no sandbox executor answers; {what} waited for {limit_s:g} s") from None
            raise TimeoutError(f"{what} took longer than {limit_s:g} s") from None

    async def _begin(
        self, chat: Chat, context_tokens: int, environment: EpisodeEnvironment, limits: Limits, task: Any
    ) -> dict[str, Any]:
        tools = Tools(self._sandbox)
        episode = await self._within(limits, "setup", environment.setup(task, tools), tools)
        try:
            transcript = Transcript(chat, context_tokens)
            opened = _Open(
                environment, limits, episode, tools, transcript, list(episode.messages), tuple(episode.tools)
            )
            prompt = self._prompt(opened)
        except BaseException:
            await self._close(episode)
            raise
        number = next(self._numbers)
        self._open[number] = opened
        text = chat.show(opened.history, opened.shown_tools)
        return {"episode": number, "prompt": prompt, "text": text}

    def _prompt(self, opened: _Open) -> dict[str, Any]:
        prompt: Prompt = opened.transcript.ask(opened.history, opened.shown_tools)
        opened.samples_of.append(prompt.sample)
        room = opened.transcript.room(prompt)
        if opened.limits.max_tokens:
            room = min(room, opened.limits.max_tokens - opened.sampled_token_count)
        return {
            "sample": prompt.sample,
            "base_sample": prompt.base_sample,
            "base_token_count": prompt.base_token_count,
            "token_ids": prompt.new_token_ids,
            "begun": prompt.begun,
            "max_new_tokens": room,
        }

    async def _step(self, opened: _Open, request: dict[str, Any]) -> dict[str, Any]:
        token_ids: list[int] = request["token_ids"]
        parsed = opened.transcript.answer(opened.samples_of[-1], token_ids, stopped=request["stopped"])
        opened.turn_count += 1
        opened.sampled_token_count += len(token_ids)
        opened.history.append(parsed.message)
        limits = opened.limits
        last = (
            (limits.ends_when_cut and not parsed.message.stopped)
            or opened.turn_count >= limits.max_turns
            or bool(limits.max_tokens and opened.sampled_token_count >= limits.max_tokens)
        )
        said = list(parsed.refusals)
        if parsed.message.tool_calls or not parsed.refusals or last:
            answered = await self._within(limits, "a step", opened.episode.step(parsed.message), opened.tools)
            if isinstance(answered, Context):
                opened.history = list(answered.messages)
                if answered.tools is not None:
                    opened.shown_tools = tuple(answered.tools)
                said = []
            elif not answered:
                return {"over": "done"}
            else:
                said = [*answered, *said]
        if last:
            return {"over": "limit"}
        opened.history += said
        try:
            return {"prompt": self._prompt(opened)}
        except ContextTooLong:
            return {"over": "context"}

    async def _score(self, opened: _Open) -> dict[str, Any]:
        score = await self._within(opened.limits, "the score", opened.episode.score(), opened.tools)
        if not isinstance(score, Score):
            raise TypeError(f"score of {opened.environment.name!r} must return a Score, got {type(score).__name__}")
        conversations = [
            [message.as_json() for message in opened.transcript.messages(sample)]
            for sample in range(opened.transcript.sample_count)
        ]
        answers = [message.content for message in opened.history if message.role == "assistant"]
        return {
            "score": score_as_json(score, answers[-1] if answers else ""),
            "conversations": conversations,
            "turn_count": opened.turn_count,
        }

    async def _close(self, episode: Episode) -> None:
        try:
            async with asyncio.timeout(min(CLOSE_TIMEOUT_S, self._max_step_s)):
                await episode.close()
        except RAISED as error:
            if given_up(error):
                raise
            log.exception("episode_not_closed")
