"""A Mooncake store behind the memory tier: blocks of workers that share no disk, under the same checks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from slipstream.engine.vllm.offload.config import NativeOffloadConfig
from slipstream.engine.vllm.offload.mooncake import MooncakeBlocks
from slipstream.launcher.child import guarded
from slipstream.launcher.mooncake import accepts, binary_path
from tests.engine.bench import prompt_of, until
from tests.offload.conftest import BLOCK_BYTES, Offloading, offloading
from tests.offload.test_files import LAYOUT
from tests.offload.test_vllm import LONG, WHOLE_BLOCKS, ask, load, new_salt
from tests.ports import free_port

MIB = 2**20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def master() -> Iterator[str]:
    """host:port of a master."""
    port = free_port()
    command = (str(binary_path()), "-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_port=0")
    process = subprocess.Popen(guarded(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    deadline_s = time.monotonic() + 90
    while not asyncio.run(accepts("127.0.0.1", port)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def test_blocks_in_the_store_are_hits_of_their_own_salt_and_layout_alone(master: str):
    """In a process of its own: Mooncake's threads may not be there when vLLM forks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-m", "tests.mooncake.lenders", master)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_master_that_is_not_there_ends_the_start_at_once():
    with pytest.raises(OSError, match="refused"):
        MooncakeBlocks(f"127.0.0.1:{free_port()}", MIB, "127.0.0.1", LAYOUT.digest)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model_dir: Path, master: str) -> AsyncIterator[tuple[Offloading, Offloading]]:
    offload = NativeOffloadConfig(memory_bytes=10 * BLOCK_BYTES, mooncake_master=master, mooncake_bytes=16 * MIB)
    async with offloading(model_dir, offload) as one, offloading(model_dir, offload) as other:
        yield one, other


@pytest.mark.asyncio(loop_scope="session")
async def test_a_prefix_is_a_hit_on_a_worker_that_shares_nothing_but_the_store(pair: tuple[Offloading, Offloading]):
    one, other = pair
    salt, prompt = new_salt(), prompt_of(LONG, 21)
    first = await ask(one, prompt, salt)
    await until(lambda: load(one).store_written_bytes > 6 * BLOCK_BYTES, "blocks in the store")
    second = await ask(other, prompt, salt)
    assert second.cached_token_count == WHOLE_BLOCKS
    assert second.token_ids == first.token_ids
    assert load(other).store_read_bytes > 6 * BLOCK_BYTES
    assert (await ask(other, prompt, new_salt())).cached_token_count == 0
    other.engine.end_salt(salt)
    one.engine.end_salt(salt)
    await one.forget()
    assert (await ask(one, prompt, salt)).cached_token_count == 0
