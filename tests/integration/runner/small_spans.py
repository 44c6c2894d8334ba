"""A third party's environment that says what it does: with `tools.span`, and with OpenTelemetry's own API."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace

from slipstream.common.sandbox_client import SandboxLimits
from slipstream.environments.base import Limits, Score, Split, Task
from slipstream.environments.config import ImportedConfig
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

tracer = trace.get_tracer("small-spans")


class Told:
    """Begins episodes of one turn. Outside of a rollout its spans are nobody's."""

    limits = Limits(max_turns=2)
    needs_sandbox = False

    def __init__(self, config: ImportedConfig, seed: int) -> None:
        self.name = config.name
        self._behaviour = config.options.get("behaviour", "")
        with tracer.start_as_current_span("nobody asked"):
            pass

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    async def setup(self, task: Task, tools: Tools) -> Telling:
        with tools.span("prepare", number=task.index, text="\ud800" * 3, odd=object(), huge=2**80, nan=float("nan")):
            await asyncio.sleep(0)
        return Telling(task.index, tools, self._behaviour)


class Telling:
    """One episode."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, number: int, tools: Tools, behaviour: str) -> None:
        self.messages = [Message("user", f"say {number}")]
        self._tools, self._behaviour = tools, behaviour

    async def step(self, message: Message) -> Sequence[Message]:
        if self._behaviour == "tells too much":
            for number in range(5000):
                with self._tools.span("one of many", number=number):
                    pass
        if self._behaviour == "says odd things":
            self._say_odd_things()
        if self._behaviour == "dies":
            os._exit(3)
        if self._behaviour == "runs code":
            with tracer.start_as_current_span("compile", attributes={"files": ("a.py", "b.py")}) as span:
                span.set_attribute("warnings", 2)
                await self._tools.run_python("print(1)", b"", SandboxLimits(wall_s=20))
        return []

    async def score(self) -> Score:
        await asyncio.to_thread(self._think)
        try:
            with tracer.start_as_current_span("fails"):
                raise LookupError("as it should")
        except LookupError:
            return Score(1.0, True)

    def _think(self) -> None:
        with self._tools.span("think", thread=threading.current_thread() is threading.main_thread()):
            pass

    def _say_odd_things(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        names: list[Any] = [None, 7, object(), "\ud800"]
        for name in names:
            with self._tools.span(name, endless=endless, nothing=None, of=name):
                pass
            with tracer.start_as_current_span(name, attributes={name: endless}) as span:
                span.set_attributes({"endless": endless})
                span.update_name(name)
            with tracer.start_as_current_span("odd", attributes=name, links=[name], start_time=name) as span:
                span.set_attributes(name)
                span.add_link(name)
            tracer.start_span("odd").end(name)

    async def close(self) -> None:
        """Holds nothing."""
