"""The environment workers of a runner: a process for each environment.

Environment code may block, crash, or take all it can: what that costs is the rollouts of its own environment, which
end with their reason, and a process, which is started again after a pause. Those of other environments go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from slipstream.common.errors import EnvironmentFailed, SlipstreamError
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


class EnvironmentPool:
    """Hands each call to the process of its environment; as one `EnvironmentWorker` would answer it."""

    def __init__(self, config_arguments: Sequence[str], timeout_s: float, environments: Sequence[str]) -> None:
        """`environments`: their names in the configuration that `config_arguments` name."""
        self._workers = [EnvironmentWorker(config_arguments, timeout_s, [name]) for name in environments]
        if not environments:  # prompts of third parties alone
            self._workers = [EnvironmentWorker(config_arguments, timeout_s, [])]
        self._places = {name: place for place, name in enumerate(environments)}

    async def run(self) -> None:
        """Keep all processes running. Raises `EnvironmentFailed` when one never starts."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.run())
        except* EnvironmentFailed as failed:
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
        return await self._workers[self._place(task)].score(task, samples)

    async def open(self, task: TaskKey, count: int) -> OpenGroup:
        """As `EnvironmentWorker.open`; the numbers of episodes tell their processes apart."""
        place = self._place(task)
        opened = await self._workers[place].open(task, count)
        members = [
            replace(each, number=each.number * len(self._workers) + place) if isinstance(each, OpenEpisode) else each
            for each in opened.members
        ]
        return replace(opened, members=members)

    async def turn(self, task: TaskKey, episode: int, token_ids: Sequence[int], *, stopped: bool) -> TurnPrompt | None:
        """As `EnvironmentWorker.turn`."""
        number, place = divmod(episode, len(self._workers))
        return await self._workers[place].turn(task, number, token_ids, stopped=stopped)

    async def end(self, task: TaskKey, episode: int) -> EndedEpisode:
        """As `EnvironmentWorker.end`."""
        number, place = divmod(episode, len(self._workers))
        return await self._workers[place].end(task, number)

    def abandon(self, episode: int) -> None:
        """As `EnvironmentWorker.abandon`."""
        number, place = divmod(episode, len(self._workers))
        self._workers[place].abandon(number)

    def _place(self, task: TaskKey) -> int:
        return self._places.get(task.environment, 0)  # a third party's own prompt is anyone's

    async def _prompts(self, place: int, tasks: Sequence[TaskKey]) -> Sequence[RenderedPrompt | SlipstreamError]:
        try:
            return await self._workers[place].prompts(tasks)
        except EnvironmentFailed as error:
            return [error] * len(tasks)
