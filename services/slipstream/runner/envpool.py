"""The environment workers of a runner: one process, or several, for each environment.

Environment code may block, crash, or take all it can: what that costs is what its own process was at, which ends with
its reason, and that process, which is started again after a pause. Those of other environments, and other processes of
the same, go on. Of a process whose loop some code held, that code alone fails: what else it was at is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from slipstream.common.config import ConfigError
from slipstream.common.errors import EnvironmentFailed, EnvironmentReplaced, SlipstreamError
from slipstream.environments.config import EnvironmentConfig
from slipstream.runner.envclient import (
    PROMPTS_AT_ONCE,
    EndedEpisode,
    EnvironmentWorker,
    OpenEpisode,
    OpenGroup,
    RenderedPrompt,
    ScoredSample,
    TaskKey,
    TurnPrompt,
)

MAX_ASKED = 4
"""Times that a call is made whose process is replaced under it, as other code blocked it."""

T = TypeVar("T")


class EnvironmentPool:
    """Hands each call to the process of its environment; as one `EnvironmentWorker` would answer it."""

    def __init__(
        self, config_arguments: Sequence[str], timeout_s: float, environments: Sequence[EnvironmentConfig]
    ) -> None:
        """`environments`: those of the configuration that `config_arguments` name."""
        self._workers: list[EnvironmentWorker] = []
        self._places: dict[str, range] = {}
        for each in environments:
            first = len(self._workers)
            self._workers += [
                EnvironmentWorker(config_arguments, timeout_s, [each.name], each.memory_limit_bytes)
                for _ in range(each.workers)
            ]
            self._places[each.name] = range(first, len(self._workers))
        if not environments:  # prompts of third parties alone
            self._workers = [EnvironmentWorker(config_arguments, timeout_s, [])]

    @property
    def ready(self) -> bool:
        """Whether all processes are up."""
        return not any(away for away, _ in (worker.load for worker in self._workers))

    async def run(self) -> None:
        """Keep all processes running. Raises what `EnvironmentWorker.run` raises when one never starts."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.run())
        except* (ConfigError, EnvironmentFailed) as failed:
            error: BaseException = failed
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def prompts(self, tasks: Sequence[TaskKey]) -> list[RenderedPrompt | SlipstreamError]:
        """Render tasks to prompts, each by itself; what fails a process is the answer for its tasks alone."""
        places = [self._place(task) for task in tasks]
        parts = [
            (place, together[start : start + PROMPTS_AT_ONCE])
            for place in set(places)
            for together in [[t for t, p in zip(tasks, places, strict=True) if p == place]]
            for start in range(0, len(together), PROMPTS_AT_ONCE)
        ]
        rendered = await asyncio.gather(*(self._prompts(place, part) for place, part in parts))
        left = {
            place: chain(*(r for (p, _), r in zip(parts, rendered, strict=True) if p == place)) for place, _ in parts
        }
        return [next(left[place]) for place in places]

    async def score(self, task: TaskKey, samples: Sequence[tuple[list[int], bool]]) -> tuple[list[ScoredSample], int]:
        """As `EnvironmentWorker.score`."""
        return await self._ask(lambda: self._workers[self._place(task)].score(task, samples))

    async def open(self, task: TaskKey, count: int) -> OpenGroup:
        """As `EnvironmentWorker.open`; the numbers of episodes tell their processes apart."""
        place, opened = await self._ask(lambda: self._open(task, count))
        members = [
            replace(each, number=each.number * len(self._workers) + place) if isinstance(each, OpenEpisode) else each
            for each in opened.members
        ]
        return replace(opened, members=members)

    async def turn(self, task: TaskKey, episode: int, token_ids: Sequence[int], *, stopped: bool) -> TurnPrompt | None:
        """As `EnvironmentWorker.turn`."""
        number, place = divmod(episode, len(self._workers))
        return await self._workers[place].turn(task, number, token_ids, stopped=stopped)

    async def end(self, task: TaskKey, episode: int, cut: str = "") -> EndedEpisode:
        """As `EnvironmentWorker.end`."""
        number, place = divmod(episode, len(self._workers))
        return await self._workers[place].end(task, number, cut)

    def abandon(self, episode: int) -> None:
        """As `EnvironmentWorker.abandon`."""
        number, place = divmod(episode, len(self._workers))
        self._workers[place].abandon(number)

    async def _open(self, task: TaskKey, count: int) -> tuple[int, OpenGroup]:
        place = self._place(task)
        return place, await self._workers[place].open(task, count)

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call again where the process was replaced for what other code did."""
        for _ in range(MAX_ASKED - 1):
            try:
                return await call()
            except EnvironmentReplaced:
                continue
        return await call()

    def _place(self, task: TaskKey) -> int:
        """The process with the least to do; a third party's own prompt is anyone's."""
        places = self._places.get(task.environment, range(1))
        return min(places, key=lambda place: self._workers[place].load)

    async def _prompts(self, place: int, tasks: Sequence[TaskKey]) -> Sequence[RenderedPrompt | SlipstreamError]:
        try:
            return await self._ask(lambda: self._workers[place].prompts(tasks))
        except EnvironmentFailed as error:
            return [error] * len(tasks)
