"""Episodes in the environment worker: the environment's side of rollouts that take turns, one episode a rollout.

| request | answer |
|---|---|
| `open` | the first prompt of each member of a group, or why it has none |
| `turn` | after a turn of the model: the next prompt, or that it is over |
| `end` | the score, and which limit ended it, if one did; the episode is closed |
| `abandon` | nothing; the episode is closed |

What an episode raises, and a call that takes longer than its limit, ends that episode alone: its answer has an `error`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog

from slipstream.common import tracing
from slipstream.common.errors import ContextTooLong, SandboxAway
from slipstream.environments.base import Context, Episode, EpisodeEnvironment, Turn
from slipstream.environments.limits import Cut, Limits
from slipstream.environments.renderer import Renderer
from slipstream.environments.roles import roles_of
from slipstream.environments.tools import Sandbox, Tools
from slipstream.runner.scores import episode_score_as_json
from slipstream.runner.seats import Seats
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
    seats: Seats
    trained_roles: Sequence[str] = ()
    """Empty: all."""
    turn_count: int = 0
    sampled_token_count: int = 0
    call: asyncio.Task[Any] | None = None
    """What last called its code, and may still be at it."""
    cut: str = ""
    """The limit that ended it, as in `Cut`; empty where its environment did."""

    def cut_short(self, why: Cut) -> None:
        """End it before its environment does, and tell that, if it wants to know."""
        self.cut = why
        tell: Callable[[Cut], None] | None = getattr(self.episode, "cut_short", None)
        if tell is not None:
            tell(why)


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
        self,
        request: dict[str, Any],
        renderer: Renderer,
        context_tokens: int,
        environment: EpisodeEnvironment,
        limits: Limits,
        trained_roles: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The answer to `open`. `trained_roles`: of the environment's, those that train; empty is all."""
        task = request["task"]
        found = environment.task(task["split"], task["index"])
        async with asyncio.TaskGroup() as group:
            members = [
                group.create_task(
                    self._guard(self._begin(renderer, context_tokens, environment, limits, found, trained_roles))
                )
                for _ in range(request["count"])
            ]
        return {
            "members": [member.result() for member in members],
            "stop_token_ids": renderer.stop_token_ids,
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
        reply = await self._guard(self._score(opened, request.get("cut", "")))
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
        self,
        renderer: Renderer,
        context_tokens: int,
        environment: EpisodeEnvironment,
        limits: Limits,
        task: Any,
        trained_roles: Sequence[str],
    ) -> dict[str, Any]:
        tools = Tools(self._sandbox)
        with tracing.span("environment_setup", environment=environment.name):
            episode = await self._within(limits, "setup", environment.setup(task, tools), tools)
        try:
            roles = roles_of(environment)
            first = str(getattr(episode, "role", "")) if roles else ""
            seats = Seats(renderer, context_tokens, roles, episode.tools, first)
            opened = _Open(environment, limits, episode, tools, seats, trained_roles)
            seats.go_on(list(episode.messages))
            text = seats.shown()
            prompt = self._prompt(opened)
        except BaseException:
            await self._close(episode)
            raise
        number = next(self._numbers)
        self._open[number] = opened
        return {"episode": number, "prompt": prompt, "text": text}

    def _prompt(self, opened: _Open) -> dict[str, Any]:
        prompt, room = opened.seats.ask()
        if opened.limits.max_tokens:
            room = min(room, opened.limits.max_tokens - opened.sampled_token_count)
        return {**prompt, "max_new_tokens": room}

    async def _step(self, opened: _Open, request: dict[str, Any]) -> dict[str, Any]:
        token_ids: list[int] = request["token_ids"]
        parsed = opened.seats.answer(token_ids, stopped=request["stopped"])
        opened.turn_count += 1
        opened.sampled_token_count += len(token_ids)
        limits = opened.limits
        last: Cut | None = None
        if limits.ends_when_cut and not parsed.message.stopped:
            last = "turn"
        elif opened.turn_count >= limits.max_turns:
            last = "turns"
        elif limits.max_tokens and opened.sampled_token_count >= limits.max_tokens:
            last = "tokens"
        said = list(parsed.refusals)
        if parsed.message.tool_calls or not parsed.refusals or last:
            with tracing.span("environment_step", environment=opened.environment.name, turn=opened.turn_count):
                answered = await self._within(limits, "a step", opened.episode.step(parsed.message), opened.tools)
            if isinstance(answered, Context | Turn):
                opened.seats.go_on(said)  # for the role that called; a `Context` of its own has no place for them
                opened.seats.go_on(answered)
                said = []
            elif not answered:
                opened.cut = "" if parsed.message.stopped else "turn"
                return {"over": True}
            else:
                said = [*answered, *said]
        if last:
            opened.cut_short(last)
            return {"over": True}
        opened.seats.go_on(said)
        try:
            return {"prompt": self._prompt(opened)}
        except ContextTooLong:
            opened.cut_short("context")
            return {"over": True}

    async def _score(self, opened: _Open, cut: Cut | Literal[""]) -> dict[str, Any]:
        """`cut`: a limit that was met outside of here."""
        if cut:
            opened.cut_short(cut)
        with tracing.span("environment_score", environment=opened.environment.name):
            score = await self._within(opened.limits, "the score", opened.episode.score(), opened.tools)
        seats = opened.seats
        return {
            "score": episode_score_as_json(
                score, seats.said, opened.environment, spoken=seats.spoken, trained=opened.trained_roles
            ),
            "conversations": seats.conversations(),
            "turn_count": opened.turn_count,
            "cut": opened.cut,
        }

    async def _close(self, episode: Episode) -> None:
        try:
            async with asyncio.timeout(min(CLOSE_TIMEOUT_S, self._max_step_s)):
                with tracing.span("environment_close"):
                    await episode.close()
        except RAISED as error:
            if given_up(error):
                raise
            log.exception("episode_not_closed")
