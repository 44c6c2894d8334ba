"""The engines under test, and all that the bodies may not know of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import Engine, KvPayload, KvReference
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.engine import EmbeddedEngine
from slipstream.engine.pulse import Pulse
from slipstream.engine.vllm.config import BLOCK_MULTIPLE, VllmConfig
from slipstream.engine.vllm.engine import VllmEngine
from slipstream.models.registry import load_sizes
from tests import standstill

FIRST = PolicyVersion(1, 0)
"""What an engine under test serves at first."""
EMBEDDED_BLOCK_TOKENS = 8
START_TIMEOUT_S = 150.0
"""Of vLLM, on a busy machine."""
TRANSFER_TIMEOUT_S = 4.0
"""For KV to come by a connector."""
SILENCE_S = 1.0
CHUNK_TOKENS = 64
"""Prompt tokens a step, where an engine can cut prompts."""


@dataclass(frozen=True)
class Limits:
    """What a body asks an engine to be built with; the rest is in `Engine.limits`."""

    kv_tokens: int = 8192
    """At least two whole contexts."""
    running_samples: int = 64
    waiting_requests: int = 256
    transfer_ttl_s: float = 60.0


class EngineUnderTest(Protocol):
    """Builds one kind of engine."""

    @property
    def name(self) -> str: ...

    @property
    def tolerance(self) -> float:
        """Of log-probabilities against the trainer's model."""
        ...

    async def build(self, model_dir: Path, limits: Limits, tensors: dict[str, torch.Tensor]) -> Engine:
        """A started engine for the model in `model_dir`, that serves `tensors` as version `FIRST`, its first ones.

        One that can chunk a prefill is to compute at most `CHUNK_TOKENS` of prompts in a step.
        """
        ...

    async def transfer(self, prefiller: Engine, transfer_id: str) -> KvPayload | KvReference:
        """Bring a prefill's KV on its way to another engine, as a decode worker does."""
        ...

    def standing_still(self, engine: Engine) -> AbstractContextManager[None]:
        """Within it, what computes does not move, while all around it goes on; it notices after `SILENCE_S`."""
        ...

    def between_steps(self, engine: Engine) -> AbstractContextManager[None]:
        """Within it, what is in flight stays there: no step is taken, and all else is done that it is asked to."""
        ...

    def check(self, engine: Engine) -> None:
        """Raise AssertionError if the engine's own books do not balance. Called when it has nothing to do."""
        ...


class Embedded:
    """The reference engine."""

    name = "embedded"
    tolerance = 1e-5

    async def build(self, model_dir: Path, limits: Limits, tensors: dict[str, torch.Tensor]) -> Engine:
        sizes = load_sizes(model_dir)
        config = EmbeddedConfig(
            block_count=limits.kv_tokens // EMBEDDED_BLOCK_TOKENS,
            block_size_tokens=EMBEDDED_BLOCK_TOKENS,
            max_running_samples=limits.running_samples,
            max_waiting_requests=limits.waiting_requests,
            max_prefill_tokens=CHUNK_TOKENS,
            transfer_ttl_s=limits.transfer_ttl_s,
        )
        engine = EmbeddedEngine(sizes, config)
        await engine.start()
        await engine.update(FIRST, tensors, lambda paused: None)
        return engine

    async def transfer(self, prefiller: Engine, transfer_id: str) -> KvPayload | KvReference:
        return prefiller.export_kv(transfer_id)

    @contextmanager
    def standing_still(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine, EmbeddedEngine)
        go_on = threading.Event()
        with sharp(engine):
            engine._post(lambda: go_on.wait(60))
            try:
                yield
            finally:
                go_on.set()

    def between_steps(self, engine: Engine) -> AbstractContextManager[None]:
        assert isinstance(engine, EmbeddedEngine)
        return standstill.no_step(engine._core)

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, EmbeddedEngine)
        engine._core.blocks.check()


@dataclass(eq=False)
class Vllm:
    """vLLM in its own process, on the CPU unless told; KV moves over NIXL, or by Mooncake's transfer engine."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    connector: Literal["nixl", "mooncake", "none"] = "nixl"
    side_channel_port: int = 0
    name = "vllm"

    @property
    def tolerance(self) -> float:
        """A GPU adds up in another order; two bytes hold three digits, and near-ties are routed otherwise."""
        return (1e-5 if self.device == "cpu" else 1e-4) if self.dtype == "float32" else 0.25

    def new(self, model_dir: Path, limits: Limits, start_timeout_s: float = START_TIMEOUT_S) -> VllmEngine:
        """One to be started."""
        config = VllmConfig(
            device=self.device,
            dtype=self.dtype,
            compiled=False,
            gpu_memory_fraction=0.05,  # several at once
            block_count=limits.kv_tokens // BLOCK_MULTIPLE + 1,  # vLLM keeps one for itself
            max_running_samples=limits.running_samples,
            max_waiting_requests=limits.waiting_requests,
            max_prefill_tokens=CHUNK_TOKENS,
            transfer_ttl_s=limits.transfer_ttl_s,
            transfer_timeout_s=TRANSFER_TIMEOUT_S,
            connector=self.connector,
            start_timeout_s=start_timeout_s,
            side_channel_port=self.side_channel_port,
        )
        return VllmEngine(model_dir, load_sizes(model_dir), config)

    async def build(self, model_dir: Path, limits: Limits, tensors: dict[str, torch.Tensor]) -> Engine:
        engine = self.new(model_dir, limits)
        computed_with_threads()
        await engine.start()
        await engine.update(FIRST, tensors, lambda paused: None)
        return engine

    async def transfer(self, prefiller: Engine, transfer_id: str) -> KvPayload | KvReference:
        return prefiller.lease_kv(transfer_id)

    @contextmanager
    def standing_still(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine, VllmEngine)
        (core,) = engine._llm.engine_core.resources.engine_manager.processes
        with sharp(engine):
            standstill.stop(core.pid)
            try:
                yield
            finally:
                os.kill(core.pid, signal.SIGCONT)

    def between_steps(self, engine: Engine) -> AbstractContextManager[None]:
        """Its steps are its own, and slow enough."""
        return nullcontext()

    def check(self, engine: Engine) -> None:
        """vLLM's books are its own."""


def computed_with_threads() -> None:
    """This thread has computed with others beside it, of which a fork is left without."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 18).cos()
    torch.set_num_threads(before)


@contextmanager
def sharp(engine: Any) -> Iterator[None]:
    """Engines are shared, and the others who use them need the patience of a busy machine."""
    pulse: Pulse = engine._pulse
    pulse.limit_s, before_s = SILENCE_S, pulse.limit_s
    try:
        yield
    finally:
        pulse.limit_s = before_s


ENGINES: list[EngineUnderTest] = [Embedded(), Vllm()]
