"""Weight updates of a vLLM engine: pause, swap, read back, verify with a probe, resume; or all the way back.

Tensors travel by files in memory; the file of the version in use is kept to go back to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from slipstream.common.errors import WeightsCorrupt
from slipstream.engine.base import PausedEngine
from slipstream.engine.tensors import check_tensors, expected_shapes
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.memory_files import MemoryFile, write_tensors
from slipstream.models.base import Sizes

Rpc = Callable[..., Awaitable[Any]]
Probe = Callable[[Sequence[int]], Awaitable[list[float]]]


class WeightsLost(Exception):
    """Nobody knows which weights the engine holds: it must not go on."""


class WeightFiles:
    """Versions as files: the one in use, and the one that is tried."""

    def __init__(self, sizes: Sizes) -> None:
        self.shapes = expected_shapes(sizes)
        self.current: MemoryFile | None = None

    def check(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors as vLLM takes them. vLLM itself takes a checkpoint that lacks a layer without a word."""
        checked = check_tensors(tensors, self.shapes)
        return {name: tensor.to(torch.float32).contiguous() for name, tensor in checked.items()}

    def write(self, tensors: dict[str, torch.Tensor]) -> MemoryFile:
        file = MemoryFile()
        write_tensors(file.path, tensors)
        return file

    def keep(self, file: MemoryFile) -> None:
        """`file` holds the version in use from now on."""
        previous, self.current = self.current, file
        if previous is not None:
            previous.close()

    def close(self) -> None:
        if self.current is not None:
            self.current.close()


class Paused(PausedEngine):
    """The engine in the pause, as `verify` sees it; used on a thread of its own, while the loop goes on."""

    def __init__(
        self, live: dict[str, np.ndarray], probe: Probe, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._live = live
        self._probe = probe
        self._loop = loop
        self._timeout_s = timeout_s

    def parameters(self) -> dict[str, np.ndarray]:
        return self._live

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        async def bounded() -> list[float]:
            async with asyncio.timeout(self._timeout_s):
                return await self._probe(token_ids)

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(self._timeout_s + 1)


class Swapper:
    """Does the swaps of one engine, inside a pause that its caller makes."""

    def __init__(self, sizes: Sizes, config: VllmConfig, rpc: Rpc, probe: Probe) -> None:
        self._files = WeightFiles(sizes)
        self._config = config
        self._rpc = rpc
        self._probe = probe

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors of a version, by name."""
        return self._files.shapes

    async def prepare(self, tensors: Mapping[str, Any]) -> MemoryFile:
        """Check a version and write it where the worker reads it: before the pause."""
        return await asyncio.to_thread(lambda: self._files.write(self._files.check(tensors)))

    async def swap(self, file: MemoryFile, verify: Callable[[PausedEngine], None]) -> tuple[dict[str, int], float]:
        """Put a prepared version in. Returns tokens sampled so far by vLLM's ids, and the seconds of the swap.

        Raises `WeightsLost` if it is unknown which weights are in now; after any other error it is the old ones.
        """
        started_s = time.monotonic()
        previous = self._files.current
        try:
            counts = await self._replace(file, previous)
            apply_s = time.monotonic() - started_s
            try:
                live = await self.read_back(file)
                paused = Paused(live, self._probe, asyncio.get_running_loop(), self._config.update_timeout_s)
                await asyncio.to_thread(verify, paused)
            except Exception:
                if previous is not None:
                    await self._replace(previous, None)
                raise
        except BaseException:
            file.close()
            raise
        self._files.keep(file)
        return counts, apply_s

    async def _replace(self, file: MemoryFile, previous: MemoryFile | None) -> dict[str, int]:
        try:
            error, counts = await self._call("slipstream_swap", file.path, previous.path if previous else None)
        except Exception as failure:  # vLLM's, or a timeout: the swap may still be going on
            raise WeightsLost(f"a weight update did not come back: {type(failure).__name__}: {failure}") from failure
        if error:
            raise WeightsCorrupt(f"vLLM could not load the weights: {error}")
        return counts

    async def read_back(self, applied: MemoryFile | None = None) -> dict[str, np.ndarray]:
        """The live parameters, read from the worker."""
        applied = applied or self._files.current
        assert applied is not None
        target = MemoryFile()
        try:
            await self._call("slipstream_read_back", applied.path, target.path)
            return await asyncio.to_thread(load_file, target.path)
        finally:
            target.close()

    def close(self) -> None:
        self._files.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        async with asyncio.timeout(self._config.update_timeout_s):
            (answer,) = await self._rpc(method, args=arguments)
            return answer
