"""Calls to vLLM's process: they end when it does, with the cause. Of vLLM's own, those that wait then wait for ever."""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

LOOK_INTERVAL_S = 0.2
"""vLLM tells by no event that its process has ended."""


class CoreEnded(RuntimeError):
    """vLLM's process is gone."""


def death_of(llm: Any) -> str:
    """What is known of the end of vLLM's process; its own words are in the worker's output."""
    manager = llm.engine_core.resources.engine_manager
    codes = [process.exitcode for process in manager.processes] if manager is not None else []
    code = next((each for each in codes if each), None)
    if code is None:
        return "vLLM's process has ended, or one of its workers has; its last words are in the worker's output"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
    hint = "; the kernel does that where memory runs out" if code == -signal.SIGKILL else ""
    return f"vLLM's process {how}{hint}; its last words, if any, are in the worker's output"


@contextmanager
def told_of_death(llm: Any) -> Generator[None, None, None]:
    """What vLLM raises within since its process has ended is raised as `CoreEnded`, which says how."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except (EngineDeadError, EngineGenerateError) as error:
        if isinstance(error, EngineGenerateError) and not llm.errored:
            raise
        raise CoreEnded(death_of(llm)) from error


def end_calls_with_core(llm: Any) -> None:
    """Have all calls of an `AsyncLLM` to its process raise `CoreEnded` once that has ended, and while it ends."""
    client = llm.engine_core
    original: Any = client._call_utility_async  # all of them go through it

    async def call(method: str, *arguments: Any, engine: bytes) -> Any:
        asked = asyncio.ensure_future(original(method, *arguments, engine=engine))
        try:
            while not asked.done() and not llm.errored:
                await asyncio.wait((asked,), timeout=LOOK_INTERVAL_S)
            if asked.done():
                with told_of_death(llm):
                    return asked.result()
        finally:
            asked.cancel()
        raise CoreEnded(death_of(llm))

    client._call_utility_async = call
