"""Calls that wait for the teacher's one thread: taken together as long as their tokens fit one pass."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.common.errors import EngineFull
from slipstream.teacher import telemetry

if TYPE_CHECKING:
    from slipstream.teacher.scorer import Asked

Score = Callable[[Sequence["Asked"]], list[NDArray[np.float32]]]


class Waiting:
    """One sequence of a call."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.answer: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()

    @property
    def token_count(self) -> int:
        return len(self.asked.token_ids)


class Desk:
    """| loop | takes | waits for | who unblocks it |
    |---|---|---|---|
    | score | sequences that wait, a pass at a time | a call; the torch thread | callers; itself |
    """

    def __init__(
        self, score: Score, executor: ThreadPoolExecutor, max_batch_tokens: int, max_waiting_tokens: int
    ) -> None:
        self._score = score
        self._executor = executor
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self.token_count = 0
        """Of sequences that wait or are worked on."""

    async def ask(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        """Answers in order. Raises `EngineFull`. Of a caller that goes away, what still waits is dropped."""
        tokens = sum(len(each.token_ids) for each in asked)
        if self.token_count and self.token_count + tokens > self._max_waiting_tokens:
            raise EngineFull(f"{self.token_count} tokens wait", limit=self._max_waiting_tokens)
        own = [Waiting(each) for each in asked]
        self._waiting.extend(own)
        self.token_count += tokens
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(each.answer for each in own)))
        finally:
            for each in own:
                each.answer.cancel()

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            batch = self._next()
            if not batch:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            began_s = time.monotonic()
            try:
                answers = await loop.run_in_executor(self._executor, self._score, [each.asked for each in batch])
            finally:
                self.token_count -= sum(each.token_count for each in batch)
            telemetry.pass_seconds.observe(time.monotonic() - began_s)
            telemetry.tokens.inc(sum(each.token_count for each in batch))
            for each, answer in zip(batch, answers, strict=True):
                if not each.answer.done():
                    each.answer.set_result(answer)

    def _next(self) -> list[Waiting]:
        """The sequences of the next pass; those that nobody waits for any more are dropped."""
        batch: list[Waiting] = []
        tokens = 0
        while self._waiting:
            first = self._waiting[0]
            if first.answer.done():
                self.token_count -= first.token_count
            elif batch and tokens + first.token_count > self._max_batch_tokens:
                break
            else:
                batch.append(first)
                tokens += first.token_count
            self._waiting.popleft()
        return batch
