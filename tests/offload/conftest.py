"""Two vLLM engines of one run that share a directory on disk, with pools so small that prefixes do not stay."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.engine import VllmEngine
from slipstream.engine.vllm.offload.config import NativeOffloadConfig
from slipstream.models.checkpoint import load_model, save_model, to_hf
from slipstream.models.registry import load_sizes
from tests.engine.bench import Bench, prompt_of
from tests.engine.engines import CHUNK_TOKENS, FIRST, START_TIMEOUT_S, Vllm
from tests.engine.oracle import weights

BLOCKS = 20
RUN = "run"
BLOCK_BYTES = 32 * 2 * 2 * 2 * 32 * 4


class Offloading(Bench):
    """One engine of the two."""

    directory: Path

    async def forget(self) -> None:
        """Fill the pool with other blocks."""
        for seed in range(4):
            await self.greedy(prompt_of(200, 900 + seed), 1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(weights(1), directory)
    return directory


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@asynccontextmanager
async def offloading(
    model_dir: Path, offload: NativeOffloadConfig, connector: Literal["none", "nixl"] = "none"
) -> AsyncIterator[Offloading]:
    """A worker on the weights of seed 1."""
    sizes = load_sizes(model_dir)
    config = VllmConfig(
        block_count=BLOCKS,
        max_running_samples=16,
        max_prefill_tokens=CHUNK_TOKENS,
        offload=offload,
        connector=connector,
        start_timeout_s=START_TIMEOUT_S,
    )
    engine = VllmEngine(model_dir, sizes, config, RUN)
    await engine.start()
    try:
        await engine.update(FIRST, to_hf(load_model(sizes, model_dir)), lambda paused: None)
        yield Offloading(Vllm(), engine, 1)
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers(model_dir: Path, directory: Path) -> AsyncIterator[tuple[Offloading, Offloading]]:
    offload = NativeOffloadConfig(memory_bytes=96 * BLOCK_BYTES, disk_bytes=2**26, directory=str(directory))
    async with offloading(model_dir, offload) as one, offloading(model_dir, offload) as other:
        one.directory = other.directory = directory
        yield one, other
    assert not list(Path("/dev/shm").glob(f"vllm_offload_slipstream-{os.getpid()}-*"))


@pytest_asyncio.fixture(loop_scope="session")
async def one(workers: tuple[Offloading, Offloading]) -> AsyncIterator[Offloading]:
    """The first worker. Both serve the same weights before and after each test."""
    yield workers[0]
    await workers[0].idle()


@pytest_asyncio.fixture(loop_scope="session")
async def other(workers: tuple[Offloading, Offloading]) -> AsyncIterator[Offloading]:
    yield workers[1]
    await workers[1].idle()
