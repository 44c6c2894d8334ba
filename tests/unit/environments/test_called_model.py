"""Loops that call the model themselves, with more questions at once than are held."""

from __future__ import annotations

import asyncio

from slipstream.environments.called_model import Ask, CalledModel
from slipstream.environments.messages import Message


async def test_a_loop_that_asks_more_than_is_held_and_ends_is_over_once_that_is_answered() -> None:
    left: list[asyncio.Future[Message]] = []

    async def loop(ask: Ask) -> str:
        question = [Message(role="user", content="?")]
        left.extend(asyncio.ensure_future(ask(question, [])) for _ in range(70))
        await asyncio.sleep(0.05)
        return "over"

    called = CalledModel(loop)
    await called.first()
    await asyncio.sleep(0.1)  # it has ended, with its questions open
    answered = 1
    async with asyncio.timeout(60):
        while await called.answer(Message(role="assistant", content="!")):
            answered += 1
        assert await called.result() == "over"
    assert 64 <= answered <= 70
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
