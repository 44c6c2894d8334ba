"""Offloading with real engines: what comes back is what was computed, its routes too; all else is a miss."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, OffloadLoad
from slipstream.engine.vllm.offload.files import BlockFiles, _files
from slipstream.engine.worker import telemetry
from slipstream.engine.worker.servicer import _offload
from tests.engine.bench import Finished, prompt_of, until
from tests.engine.engines import FIRST
from tests.engine.oracle import Oracle
from tests.offload.conftest import BLOCK_BYTES, RUN, Offloading

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 200
WHOLE_BLOCKS = 6 * 32
_numbers = itertools.count()


def new_salt(version: PolicyVersion = FIRST) -> str:
    return f"{RUN}/{version.incarnation}/{version.step}/float32-{next(_numbers)}"


def load(bench: Offloading) -> OffloadLoad:
    offload = bench.engine.load().offload
    assert offload is not None
    return offload


def on_disk(bench: Offloading, salt: str) -> list[Path]:
    directory = BlockFiles(bench.directory, 1, b"")
    found = [path for _, path, _ in _files(directory._salt(salt)) if len(path.name) == 72]
    directory.close()
    return found


async def written(bench: Offloading, salt: str, count: int = 6) -> None:
    await until(lambda: len(on_disk(bench, salt)) >= count, "blocks on disk")


def check(bench: Offloading, request: DecodeRequest, sample: Finished) -> None:
    """Log-probabilities and routes are the oracle's, and all of them are known."""
    prompt = list(request.token_ids)
    assert bench.error_of(prompt, sample, None, 0.0) < bench.kind.tolerance
    parts = [bench.engine.routes(key) for key in (request.request_id, request.sample_ids[0])]
    assert [(part.first_position, part.unknown_ranges) for part in parts] == [(0, ()), (len(prompt) - 1, ())]
    expected = bench.oracle.forward([*prompt, *sample.token_ids]).routes
    assert np.array_equal(np.sort(np.concatenate([part.rows for part in parts]), -1), np.sort(expected[:-1], -1))


async def ask(bench: Offloading, prompt: list[int], salt: str, count: int = 8) -> Finished:
    """A greedy answer, held against the oracle."""
    request = bench.request(prompt, salt=salt, temperature=0.0, max_new_tokens=count)
    (sample,) = await bench.run(request)
    check(bench, request, sample)
    return sample


async def test_an_evicted_prefix_comes_back_from_memory_with_its_routes(one: Offloading):
    salt, prompt = new_salt(), prompt_of(LONG, 1)
    assert (await ask(one, prompt, salt)).cached_token_count == 0
    await one.forget()
    before = load(one)
    again = await ask(one, prompt, salt)
    assert again.cached_token_count == WHOLE_BLOCKS
    after = load(one)
    assert after.hit_tokens - before.hit_tokens == WHOLE_BLOCKS
    assert after.query_tokens - before.query_tokens >= WHOLE_BLOCKS
    assert after.disk_read_bytes == before.disk_read_bytes
    assert after.memory_bytes >= 6 * BLOCK_BYTES
    # What was restored is in the pool now, and its routes with it.
    assert (await ask(one, prompt, salt)).cached_token_count == WHOLE_BLOCKS
    assert load(one).hit_tokens == after.hit_tokens


async def test_a_prefix_computed_on_one_worker_is_a_hit_on_another(one: Offloading, other: Offloading):
    salt, prompt = new_salt(), prompt_of(LONG, 2)
    first = await ask(one, prompt, salt)
    await written(one, salt)
    before = load(other)
    second = await ask(other, prompt, salt)
    assert second.cached_token_count == WHOLE_BLOCKS
    assert second.token_ids == first.token_ids
    assert second.oldest == {one.version}
    after = load(other)
    assert after.hit_tokens - before.hit_tokens == WHOLE_BLOCKS
    assert after.disk_read_bytes > before.disk_read_bytes


async def test_the_next_turn_finds_the_sampled_tokens_too(one: Offloading, other: Offloading):
    salt, prompt = new_salt(), prompt_of(60, 3)
    turn = await ask(one, prompt, salt, 80)
    await written(one, salt, 4)
    longer = [*prompt, *turn.token_ids, *prompt_of(20, 4)]
    assert (await ask(other, longer, salt)).cached_token_count == (60 + 80 - 1) // 32 * 32


async def test_another_salt_is_a_miss_in_every_tier(one: Offloading, other: Offloading):
    prompt = prompt_of(LONG, 5)
    salt = new_salt()
    await ask(one, prompt, salt)
    await written(one, salt)
    for bench in (one, other):
        for stranger in (new_salt(PolicyVersion(1, 1)), new_salt(PolicyVersion(2, 0)), f"another-{next(_numbers)}"):
            assert (await ask(bench, prompt, stranger)).cached_token_count == 0


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign"])
async def test_a_file_that_cannot_be_trusted_is_computed_anew(one: Offloading, other: Offloading, damage: str):
    salt, prompt = new_salt(), prompt_of(LONG, 6)
    await ask(one, prompt, salt)
    await written(one, salt)
    files = sorted(on_disk(one, salt))
    contents = [path.read_bytes() for path in files]
    for index, path in enumerate(files):
        if damage == "truncated":
            path.write_bytes(contents[index][:-100])
        elif damage == "changed":
            path.write_bytes(contents[index][:5000] + b"\xff\xff" + contents[index][5002:])
        else:  # another block of the same salt
            path.write_bytes(contents[index - 1])
    before = load(other)
    assert (await ask(other, prompt, salt)).cached_token_count == 0
    assert load(other).rejected_blocks - before.rejected_blocks == len(files)


async def test_requests_in_flight_cross_an_update_and_the_tiers_hold_the_right_versions(
    one: Offloading, other: Offloading
):
    for bench in (one, other):
        assert bench.seed == 1
    old, prompt = new_salt(one.version), prompt_of(LONG, 7)
    await ask(one, prompt, old)
    await one.forget()
    requests = [one.request(prompt_of(40, 50 + n), temperature=0.0, max_new_tokens=100, salt=old) for n in range(3)]
    running = [asyncio.create_task(one.run(each, flush_s=0.0)) for each in requests]
    await until(lambda: one.engine.load().running_samples == 3, "running samples")
    before = one.version
    # A restore from memory is under way when the pause begins.
    restored = one.request(prompt, temperature=0.0, max_new_tokens=4, salt=old)
    late = asyncio.create_task(one.run(restored))
    await asyncio.sleep(0)
    version = await one.serve(2)
    for task in running:
        (sample,) = await task
        assert len(sample.token_ids) == 100
        assert set(sample.versions) == {before, version}
    (sample,) = await late
    assert sample.cached_token_count == WHOLE_BLOCKS
    assert sample.oldest == {before}
    fresh = new_salt(version)
    assert (await ask(one, prompt, fresh)).cached_token_count == 0
    await written(one, fresh)
    await other.serve(2)
    other.version = version
    second = await ask(other, prompt, fresh)
    assert second.cached_token_count == WHOLE_BLOCKS
    assert second.oldest == {version}
    # A late member of the old group rests on KV of the old weights, and says so, on a worker that never saw it.
    (late_member,) = await other.run(other.request(prompt, temperature=0.0, salt=old))
    assert late_member.cached_token_count == WHOLE_BLOCKS
    assert late_member.oldest == {before}
    for bench in (one, other):
        await bench.serve(1)


async def test_in_flight_tokens_on_restored_kv_are_the_swapped_oracles(one: Offloading):
    """The prompt's KV is of the old weights, restored; every token after the update is of the new ones."""
    salt, prompt = new_salt(one.version), prompt_of(LONG, 8)
    first = await ask(one, prompt, salt, 1)
    await one.forget()
    await one.serve(2)
    request = one.request(prompt, salt=salt, temperature=0.0, max_new_tokens=1)
    (kept,) = await one.run(request)
    assert kept.cached_token_count == WHOLE_BLOCKS
    restored = np.sort(one.engine.routes(request.request_id).rows[:WHOLE_BLOCKS], -1)
    old, new = (np.sort(Oracle(seed).forward(prompt).routes[:WHOLE_BLOCKS], -1) for seed in (1, 2))
    assert np.array_equal(restored, old)
    assert not np.array_equal(restored, new)
    assert first.finish_reason
    await one.serve(1)


async def test_a_crowd_that_evicts_and_restores_all_the_time_is_answered_right(one: Offloading, other: Offloading):
    salts = [new_salt() for _ in range(2)]
    stems = [prompt_of(100, 70 + number) for number in range(4)]

    async def client(bench: Offloading, number: int) -> None:
        prompt = stems[number % 4] + prompt_of(30 + number, 80 + number)
        await ask(bench, prompt, salts[number % 2], 30)

    before = load(one).hit_tokens + load(other).hit_tokens
    for _ in range(2):
        await asyncio.gather(*(client(bench, number) for bench in (one, other) for number in range(12)))
    assert load(one).hit_tokens + load(other).hit_tokens > before


async def test_the_end_of_a_salt_frees_memory_and_disk_and_takes_nothing_more(one: Offloading, other: Offloading):
    salt, prompt = new_salt(), prompt_of(LONG, 9)
    await ask(one, prompt, salt)
    await written(one, salt)
    await ask(other, prompt, salt)
    held = load(one).memory_bytes
    for bench in (one, other):
        bench.engine.end_salt(salt)
    await until(lambda: not on_disk(one, salt) and load(one).memory_bytes < held, "freed bytes")
    assert load(one).dead_bytes == load(other).dead_bytes == 0
    await one.forget()
    assert (await ask(one, prompt, salt)).cached_token_count == 0
    await one.forget()
    assert (await ask(one, prompt, salt)).cached_token_count == 0
    assert not on_disk(one, salt)


async def test_the_figures_are_metrics_and_in_the_load_report(one: Offloading):
    salt = new_salt()
    await one.greedy(prompt_of(40, 10), salt=salt)
    await written(one, salt, 1)  # nothing is on its way to disk while figures are compared
    telemetry.observe(one.engine, lambda: one.version, lambda: False)

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"slipstream_worker_offload_{name}", labels)

    figures = load(one)
    assert value("query_tokens_total") == figures.query_tokens > 0
    assert value("hit_tokens_total") == figures.hit_tokens > 0
    assert value("held_bytes", tier="memory") == figures.memory_bytes > 0
    assert value("held_bytes", tier="disk") == figures.disk_bytes > 0
    assert value("dead_bytes") == 0
    assert value("moved_bytes_total", tier="disk", direction="written") == figures.disk_written_bytes > 0
    assert value("lost_blocks_total", reason="rejected") == figures.rejected_blocks
    told = _offload(figures)
    assert (told.query_token_count, told.hit_token_count) == (figures.query_tokens, figures.hit_tokens)
    assert (told.memory_bytes, told.disk_bytes, told.dead_bytes) == (figures.memory_bytes, figures.disk_bytes, 0)
