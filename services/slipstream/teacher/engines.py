"""What computes: a model of ours on a thread, or vLLM in processes of its own. Importing this takes no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.vllm.installed import check_judge
from slipstream.engine.vllm.judge import VllmJudge
from slipstream.engine.vllm.judge_config import VllmJudgeConfig
from slipstream.models.teachers import Bounds, bounds_on_vllm
from slipstream.teacher.asked import Asked
from slipstream.teacher.config import TeacherConfig

if TYPE_CHECKING:
    from slipstream.teacher.scorer import Scorer

WATCH_INTERVAL_S = 0.5


class Engine(Protocol):
    """A model that is loaded."""

    bounds: Bounds
    loops: Mapping[str, Callable[[], Awaitable[None]]]
    """Beside that of the desk."""

    async def score(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        """As `asked.Score` has it."""
        ...

    async def stop(self) -> None: ...


async def start_engine(config: TeacherConfig) -> Engine:
    """The one that is configured. Raises `ConfigError`. Call it before gRPC begins: vLLM forks."""
    if isinstance(config.engine, VllmJudgeConfig):
        return await OnVllm.start(config, config.engine)
    return await OnThread.start(config)


class OnThread:
    """A model of ours, on its thread."""

    def __init__(self, scorer: Scorer, executor: ThreadPoolExecutor) -> None:
        self._scorer = scorer
        self._executor = executor
        self.bounds = Bounds(scorer.sizes.vocab_size, scorer.sizes.max_context_tokens)
        self.loops: Mapping[str, Callable[[], Awaitable[None]]] = {}

    @classmethod
    async def start(cls, config: TeacherConfig) -> OnThread:
        from slipstream.teacher.scorer import Scorer  # torch takes seconds: not for --help

        executor = ThreadPoolExecutor(1, thread_name_prefix="torch")
        return cls(await asyncio.get_running_loop().run_in_executor(executor, Scorer, config), executor)

    async def score(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.score, asked)

    async def stop(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class OnVllm:
    """vLLM, which batches and chunks by itself what goes in together."""

    def __init__(self, judge: VllmJudge, bounds: Bounds) -> None:
        self._judge = judge
        self.bounds = bounds
        self.loops: Mapping[str, Callable[[], Awaitable[None]]] = {"engine": self._watch}

    @classmethod
    async def start(cls, config: TeacherConfig, engine: VllmJudgeConfig) -> OnVllm:
        check_judge("engine.type", config.device)
        bounds = bounds_on_vllm(config.teacher_model)
        judge = await VllmJudge.start(config.teacher_model, bounds.max_context_tokens, engine, config.torch_threads)
        return cls(judge, bounds)

    async def score(self, asked: Sequence[Asked]) -> list[NDArray[np.float32]]:
        try:
            async with asyncio.TaskGroup() as group:  # one that fails takes the others with it: vLLM forgets them
                tasks = [
                    group.create_task(self._judge.logprobs(each.token_ids, each.positions, each.temperature))
                    for each in asked
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def stop(self) -> None:
        await self._judge.stop()

    async def _watch(self) -> None:
        """Raise once vLLM is gone; it tells by no event."""
        while not self._judge.ended:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_INTERVAL_S)
        raise RuntimeError(self._judge.death)
