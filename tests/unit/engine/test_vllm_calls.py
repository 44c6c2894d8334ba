"""Calls to vLLM's process, against one that answers, and one that dies without an answer."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.vllm.calls import CoreEnded, end_calls_with_core

pytestmark = pytest.mark.asyncio


def new_llm(answer: asyncio.Future[Any], exit_code: int | None) -> Any:
    """An `AsyncLLM` whose process says `answer` to everything, and ends with `exit_code`."""

    async def call(method: str, *arguments: Any, engine: bytes) -> Any:
        return method, arguments, await answer

    process = SimpleNamespace(exitcode=exit_code)
    resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
    return SimpleNamespace(errored=False, engine_core=SimpleNamespace(_call_utility_async=call, resources=resources))


async def test_a_call_that_waits_ends_with_the_process_and_says_how_that_did():
    llm = new_llm(asyncio.get_running_loop().create_future(), -signal.SIGKILL)
    end_calls_with_core(llm)
    waiting = asyncio.create_task(llm.engine_core._call_utility_async("pause", engine=b""))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    llm.errored = True
    with pytest.raises(CoreEnded, match="vLLM's process was killed by SIGKILL; the kernel does that where memory"):
        async with asyncio.timeout(60):
            await waiting


async def test_what_is_answered_is_what_the_process_said():
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    llm = new_llm(answer, None)
    end_calls_with_core(llm)
    asyncio.get_running_loop().call_soon(answer.set_result, 7)
    async with asyncio.timeout(60):
        assert await llm.engine_core._call_utility_async("report", 3, engine=b"") == ("report", (3,), 7)


async def test_a_call_that_is_given_up_is_given_up_in_vllm():
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    llm = new_llm(answer, None)
    end_calls_with_core(llm)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await llm.engine_core._call_utility_async("report", engine=b"")
    await asyncio.sleep(0)
    assert answer.cancelled()
