"""Joins groups of expressions that are judged at about the same time into one execution.

An execution costs some 15 ms of processor time, of which judging is a small part: starting a jail and an interpreter
is the rest. Whoever comes first waits `window_s` for others, then runs the program for all of them. Each sample is
judged under limits of its own in any case, so a neighbour changes no verdict.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.common import tracing
from slipstream.common.sandbox_client import ExecResult

Verdict = dict[str, Any] | None
Execute = Callable[[list[int], list[str | None]], Awaitable[ExecResult]]
"""Runs the judge on targets and expressions, one of each for a sample."""

MAX_JOINED_SAMPLES = 48


@dataclass(eq=False)
class _Group:
    target: int
    expressions: Sequence[str | None]
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is judged, has failed, or may lead."""
    verdicts: list[Verdict] | None = None
    outcome: str = ""
    trace: tracing.TraceContext | None = field(default_factory=tracing.current)
    """Of the call that waits for it."""
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.verdicts is not None or self.error is not None


class JudgeQueue:
    """Groups in line. One of them leads at a time: it runs the execution of all that wait."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._waiting: deque[_Group] = deque()
        self._led = False

    async def judge(
        self, target: int, expressions: Sequence[str | None], execute: Execute
    ) -> tuple[list[Verdict], str]:
        """The judge's lines by sample, None where it got no further, and the outcome of the execution."""
        group = _Group(target, expressions)
        self._waiting.append(group)
        try:
            while not group.ended:
                if self._led:
                    await group.turn.wait()
                    group.turn.clear()
                else:
                    await self._lead(execute)
        finally:
            if group in self._waiting:  # cancelled: somebody else may have counted on it to lead
                self._waiting.remove(group)
                self._wake_next()
        if group.error is not None:
            raise group.error
        assert group.verdicts is not None
        return group.verdicts, group.outcome

    async def _lead(self, execute: Execute) -> None:
        self._led = True
        batch: list[_Group] = []
        try:
            await asyncio.sleep(self._window_s)
            samples = 0
            while self._waiting and (not batch or samples + len(self._waiting[0].expressions) <= MAX_JOINED_SAMPLES):
                batch.append(self._waiting.popleft())
                samples += len(batch[-1].expressions)
            await self._run(batch, execute)
        finally:
            self._waiting.extendleft(group for group in reversed(batch) if not group.ended)  # cancelled
            self._led = False
            for group in batch:
                group.turn.set()
            self._wake_next()

    async def _run(self, batch: list[_Group], execute: Execute) -> None:
        targets = [group.target for group in batch for _ in group.expressions]
        began_s = time.monotonic()
        try:
            with tracing.entered(batch[0].trace), tracing.span("judge", groups=len(batch)):
                judged_in = tracing.current()
                result = await execute(targets, [text for group in batch for text in group.expressions])
        except Exception as error:  # of all of them: whatever it was, each group fails with it
            for group in batch:
                group.error = error
            return
        for group in batch[1:]:
            tracing.record("judge", group.trace, time.monotonic() - began_s, links=[judged_in], groups=len(batch))
        verdicts = parse_verdicts(result.stdout, len(targets))
        start = 0
        for group in batch:
            end = start + len(group.expressions)
            group.verdicts, group.outcome = verdicts[start:end], result.outcome
            start = end

    def _wake_next(self) -> None:
        if self._waiting and not self._led:
            self._waiting[0].turn.set()


def parse_verdicts(stdout: bytes, count: int) -> list[Verdict]:
    """The judge's lines by sample; None where it got no further."""
    verdicts: list[Verdict] = [None] * count
    for line in stdout.splitlines():
        try:
            verdict = json.loads(line)
        except ValueError:
            continue  # a line that the output limit cut
        if isinstance(verdict, dict) and isinstance(verdict.get("sample"), int) and 0 <= verdict["sample"] < count:
            verdicts[verdict["sample"]] = verdict
    return verdicts
