"""Environments that call the model themselves, as episodes: their own loop runs as a task and is answered turn by turn.

loop = CalledModel(lambda ask: their_rollout(ask))      # ask(messages, tools) -> Message
messages, tools = await loop.first()
... = await loop.answer(message)                        # their next question, or nothing when the loop has ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.environments.base import Context
from slipstream.environments.messages import Message, ToolSpec, said_the_same

Ask = Callable[[Sequence[Message], Sequence[ToolSpec]], Awaitable[Message]]
"""What their loop calls for the model's next message."""


CLOSE_TIMEOUT_S = 5.0


class NoMoreTurns(Exception):
    """Their loop asked once more, and the rollout has had its last turn."""


@dataclass
class _Question:
    messages: list[Message]
    tools: list[ToolSpec]
    answer: asyncio.Future[Message]


class CalledModel:
    """One rollout of their loop. Of several questions at once, one is answered after the other."""

    def __init__(self, loop: Callable[[Ask], Awaitable[Any]]) -> None:
        self._questions: asyncio.Queue[_Question | None] = asyncio.Queue(maxsize=64)
        self._asked: _Question | None = None
        self._history: list[Message] = []
        self._closed = False
        self._task = asyncio.ensure_future(loop(self._ask))
        self._task.add_done_callback(lambda _: self._ended())

    async def first(self) -> tuple[list[Message], list[ToolSpec]]:
        """What the model is asked first. Raises what their loop raised, or `ValueError` if it asks nothing."""
        asked = await self._next()
        if asked is None:
            raise ValueError("the environment ended before it asked the model anything")
        self._history = asked.messages
        return asked.messages, asked.tools

    async def answer(self, message: Message) -> Sequence[Message] | Context:
        """Hand their loop the model's message; returns what comes after it, or nothing when the loop has ended."""
        assert self._asked is not None
        if not self._asked.answer.done():
            self._asked.answer.set_result(message)
        before = [*self._history, message]
        asked = await self._next()
        if asked is None:
            return []
        self._history = asked.messages
        begun = asked.messages[: len(before)]
        if len(begun) == len(before) < len(asked.messages) and all(map(said_the_same, begun, before)):
            return asked.messages[len(before) :]
        return Context(asked.messages, asked.tools)

    async def result(self) -> Any:
        """What their loop returns. What it still asks is refused: the rollout has had its last turn."""
        self._closed = True
        if self._asked is not None and not self._asked.answer.done():
            self._asked.answer.set_exception(NoMoreTurns())
        while not self._questions.empty():
            asked = self._questions.get_nowait()
            if asked is not None:
                asked.answer.set_exception(NoMoreTurns())
        return await self._task

    async def close(self) -> None:
        """End their loop where it still runs."""
        self._closed = True
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    async def _ask(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        if self._closed:
            await asyncio.sleep(0)  # a loop that asks again and again is ended by its time, and holds up nobody
            raise NoMoreTurns
        asked = _Question(list(messages), list(tools), asyncio.get_running_loop().create_future())
        await self._questions.put(asked)
        return await asked.answer

    async def _next(self) -> _Question | None:
        over = self._task.done() and self._questions.empty()  # its end had no place in a full queue
        self._asked = None if over else await self._questions.get()
        if self._asked is None:
            self._task.result()  # raises what their loop raised
        return self._asked

    def _ended(self) -> None:
        if not self._questions.full():
            self._questions.put_nowait(None)
        if not self._task.cancelled():
            self._task.exception()  # looked at: whoever asks for the result gets it
