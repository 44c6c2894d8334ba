"""Calls that wait for the teacher: taken together as long as their tokens fit one pass.

A pass that fails is tried again, each of its sequences alone, so that a bad one costs its own call and no other; so is
a sequence of which the teacher says nothing but NaN, infinities or positive numbers. The process ends only where the
teacher cannot even say what it could before: then nothing that waits can be answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from slipstream.common.errors import EngineFull, TeacherFailed
from slipstream.teacher import telemetry
from slipstream.teacher.asked import Asked, Score
from slipstream.teacher.trial import known

log = structlog.get_logger()

TRIES = 2
"""Of a sequence alone."""
RETRY_PAUSE_S = 0.1
CHECK = Asked(np.zeros(2, np.int32), np.array([1]), 1.0)
"""What every teacher can answer."""


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
    | score | sequences that wait, a pass at a time | a call; the engine | callers; itself |
    """

    def __init__(self, score: Score, max_batch_tokens: int, max_waiting_tokens: int) -> None:
        self._score = score
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self.token_count = 0
        """Of sequences that wait or are worked on."""

    async def ask(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        """Answers in order. Raises `EngineFull`, `TeacherFailed`.

        Of a caller that goes away, or one of whose sequences failed, what still waits is dropped.
        """
        tokens = sum(len(each.token_ids) for each in asked)
        if self.token_count and self.token_count + tokens > self._max_waiting_tokens:
            raise EngineFull(
                f"{self.token_count} tokens wait, and {tokens} more would be too many (teacher.max_waiting_tokens)",
                name="teacher.max_waiting_tokens",
                limit=self._max_waiting_tokens,
            )
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
        """For ever. Raises what the teacher says of a sequence that every teacher can answer."""
        while True:
            batch = self._next()
            if not batch:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            try:
                await self._pass(batch)
            finally:
                self.token_count -= sum(each.token_count for each in batch)

    async def _pass(self, batch: list[Waiting]) -> None:
        if await self._try(batch) is None:
            return
        for each in batch:
            if not each.answer.done():  # somebody still waits for it
                await self._alone(each)

    async def _alone(self, waiting: Waiting) -> None:
        for _ in range(TRIES):
            await asyncio.sleep(RETRY_PAUSE_S)
            if await self._try([waiting]) is None:
                return
        [answer] = await self._score([CHECK])
        if not known(answer).all():
            raise RuntimeError(f"the teacher gives no log-probability of two tokens but {answer.tolist()}")
        log.error("sequence_not_judged", token_count=waiting.token_count)
        if not waiting.answer.done():
            waiting.answer.set_exception(TeacherFailed(f"the teacher failed over {waiting.token_count} tokens"))

    async def _try(self, batch: list[Waiting]) -> Exception | None:
        """One pass. What was wrong; None if all have their answers."""
        began_s = time.monotonic()
        try:
            answers = await self._score([each.asked for each in batch])
        except Exception as error:
            telemetry.failed_passes.inc()
            log.warning("pass_failed", sequence_count=len(batch), exc_info=True)
            return error
        telemetry.pass_seconds.observe(time.monotonic() - began_s)
        telemetry.tokens.inc(sum(each.token_count for each in batch))
        blind = 0
        for each, answer in zip(batch, answers, strict=True):
            if not known(answer).any():
                blind += 1  # a number that nobody can learn from is no answer
            elif not each.answer.done():
                each.answer.set_result(answer)
        if not blind:
            return None
        telemetry.failed_passes.inc()
        log.warning("pass_without_log_probabilities", sequence_count=blind)
        return ValueError("no log-probability of any token")

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
