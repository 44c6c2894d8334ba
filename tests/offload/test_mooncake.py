"""A Mooncake store behind the memory tier: blocks of workers that share no disk, under the same checks."""

from __future__ import annotations

import asyncio
import socket
import subprocess
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
from tests.offload.test_files import LAYOUT, SALT, key, parts, room
from tests.offload.test_vllm import LONG, WHOLE_BLOCKS, ask, load, new_salt

MIB = 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def master() -> Iterator[str]:
    """host:port of a master."""
    port = free_port()
    command = (str(binary_path()), "-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_port=0")
    process = subprocess.Popen(guarded(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    deadline_s = time.monotonic() + 20
    while not asyncio.run(accepts("127.0.0.1", port)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(10)


@pytest.fixture
def lenders(master: str) -> Iterator[list[MooncakeBlocks]]:
    """Two workers of one layout, and one of another."""
    layouts = (LAYOUT.digest, LAYOUT.digest, b"another".ljust(32))
    lenders = [MooncakeBlocks(master, 32 * MIB, "127.0.0.1", layout) for layout in layouts]
    yield lenders
    for lender in lenders:
        lender.close()


def test_a_block_comes_back_to_another_worker_and_to_no_other_salt_or_layout(lenders: list[MooncakeBlocks]):
    one, other, stranger = lenders
    assert one.write(SALT, key(1), parts(1))
    target = room()
    assert other.find(SALT, [key(1), key(2)]) == [True, False]
    assert other.read(SALT, key(1), target)
    assert target == parts(1)
    assert other.find("run/1/8/bfloat16", [key(1)]) == stranger.find(SALT, [key(1)]) == [False]
    assert not stranger.read(SALT, key(1), room())
    assert not other.read(SALT, key(2), room())
    assert other.rejected_files == 0


def test_what_is_not_what_its_name_says_is_a_miss_counted_and_removed(lenders: list[MooncakeBlocks]):
    one, other, _ = lenders
    for number, data in ((11, b"short"), (12, b"x" * 1500)):
        assert one._store.put(one._name(SALT, key(number)), data) == 0
        assert not other.read(SALT, key(number), room())
    assert one.write(SALT, key(13), parts(13))
    foreign = bytes(one._store.get(one._name(SALT, key(13))))
    assert one._store.put(one._name(SALT, key(14)), foreign) == 0
    assert not other.read(SALT, key(14), room())
    assert other.rejected_files == 3


def test_the_end_of_a_salt_removes_its_blocks_even_if_just_read(lenders: list[MooncakeBlocks]):
    one, other, _ = lenders
    ending = "run/1/5/bfloat16"
    for salt in (ending, "run/1/6/bfloat16"):
        assert one.write(salt, key(1), parts(1))
    assert other.read(ending, key(1), room())
    assert other.end(ending) == 1
    assert one.find(ending, [key(1)]) == [False]
    assert one.find("run/1/6/bfloat16", [key(1)]) == [True]


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
