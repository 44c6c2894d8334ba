"""The load an engine reports is what the test counts itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import EngineLoad
from slipstream.engine.hashing import block_hashes
from tests.engine.bench import Bench, prompt_of, unique, until
from tests.engine.oracle import tensors

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_counters_are_the_tests_own_count(bench: Bench):
    prompts = [prompt_of(5 + 7 * index, seed=index) for index in range(6)]
    before = bench.engine.load()
    answers = await asyncio.gather(*(bench.ask(p, 3, max_new_tokens=9) for p in prompts))
    sampled = sum(len(sample.token_ids) for samples in answers for sample in samples)
    computed = sum(len(prompt) - 1 for prompt in prompts)
    load = bench.engine.load()
    assert load.decoded_tokens - before.decoded_tokens == sampled
    assert load.prefilled_tokens - before.prefilled_tokens == computed
    assert load.prefix_query_tokens - before.prefix_query_tokens == computed
    assert load.prefix_hit_tokens == before.prefix_hit_tokens
    assert 9 <= load.decode_steps - before.decode_steps <= sampled
    assert load.blocks_total == bench.engine.limits.block_count


async def test_gauges_follow_what_runs_waits_and_is_held(small: Bench):
    engine, streams = small.engine, []
    for index in range(2):
        streams.append(asyncio.create_task(small.ask(prompt_of(9, seed=index), 2, max_new_tokens=110)))
    await until(lambda: engine.load().running_samples == 4, "four running samples")
    held = -(-(9 + 110) // small.block) * 4
    assert 0 < engine.load().blocks_used <= held
    queued = [small.request(prompt_of(9, seed=9), max_new_tokens=3) for _ in range(3)]
    with small.between_steps():
        waiting = [asyncio.create_task(small.run(request)) for request in queued]
        await until(lambda: engine.load().waiting_requests == 3, "three requests that wait")
        assert engine.load().running_samples == 4
        assert await engine.abort(queued[1].request_id) == 1
        assert engine.load().waiting_requests == 2
    await asyncio.gather(*streams, *waiting)
    await small.idle()


async def test_a_prefill_that_is_held_counts_as_a_transfer_and_as_blocks(prefiller: Bench):
    if await prefiller.prefill(job := prefiller.prefill_request(prompt_of(20))):
        assert prefiller.engine.load().kv_transfers == 1
        assert prefiller.engine.load().blocks_used == -(-19 // prefiller.block)
        assert prefiller.engine.release_kv(job.request_id)


def spent_s(processes: list[psutil.Process]) -> dict[tuple[int, int], float]:
    """Of each thread, by process and thread."""
    return {
        (process.pid, thread.id): thread.user_time + thread.system_time
        for process in processes
        for thread in process.threads()
    }


def called(pid: int, thread_id: int) -> str:
    """A thread as people know it; it may have ended."""
    with suppress(OSError):
        return f"{Path(f'/proc/{pid}/task/{thread_id}/comm').read_text().strip()} of {pid}"
    return f"{thread_id} of {pid}"


async def test_engines_with_nothing_to_do_leave_the_processors_alone(bench: Bench, prefiller: Bench):
    await asyncio.gather(bench.idle(), prefiller.idle())
    ours = psutil.Process()
    processes = [ours, *ours.children(recursive=True)]
    before_s = spent_s(processes)
    await asyncio.sleep(2)
    busy_s = {thread: round(after_s - before_s.get(thread, 0), 2) for thread, after_s in spent_s(processes).items()}
    busiest = sorted(busy_s.items(), key=lambda each: -each[1])[:8]
    assert sum(busy_s.values()) < 0.5, [(called(*thread), spent) for thread, spent in busiest]


async def test_counters_at_an_update_are_what_was_sampled_before_it(bench: Bench):
    """Between two steps nothing moves, so the count is exact: the versions say what came before the pause."""
    old, before = bench.version, bench.engine.load()
    requests = [bench.request(prompt_of(9 + index), 2, max_new_tokens=150) for index in range(3)]
    running = [asyncio.create_task(bench.run(request)) for request in requests]
    await until(lambda: bench.engine.load().running_samples == 6, "six running samples")
    seen: list[EngineLoad] = []
    version = PolicyVersion(old.incarnation, old.step + 1)
    with bench.between_steps():
        report = await bench.engine.update(version, tensors(2), lambda paused: seen.append(bench.engine.load()))
    bench.version, bench.seed = version, 2
    answers = await asyncio.gather(*running)
    sampled = sum(sample.versions.count(old) for samples in answers for sample in samples)
    prompts = sum(2 * len(request.token_ids) for request in requests)
    (paused,) = seen
    assert paused.running_samples == report.in_flight_samples == 6
    assert paused.decoded_tokens - before.decoded_tokens == sampled
    assert paused.tokens_in_flight == prompts + sampled
    assert bench.engine.load().decoded_tokens - before.decoded_tokens == 6 * 150
    await bench.idle()
    assert bench.engine.load().tokens_in_flight == 0


async def test_route_bytes_come_and_go_with_the_rows(bench: Bench):
    if not bench.engine.capabilities.captures_routes:
        assert bench.engine.load().route_bytes == 0
        return
    before = bench.engine.load().route_bytes
    request = bench.request(prompt_of(20), samples=2, max_new_tokens=10)
    await bench.run(request)
    keys = [request.request_id, *request.sample_ids]
    assert bench.engine.load().route_bytes - before >= (19 + 2 * 10) * bench.engine.limits.route_row_bytes
    assert all(bench.engine.release_routes(key) for key in keys)
    assert not any(bench.engine.release_routes(key) for key in keys)
    assert bench.engine.load().route_bytes == before


async def test_cache_events_name_the_blocks_that_can_be_hit(small: Bench):
    prompt, salt = prompt_of(2 * small.block + 3), unique("salt")
    expected = block_hashes(salt, prompt[:-1], small.block)
    known: set[int] = set()

    def absorb() -> None:
        for event in small.engine.drain_kv_events():
            if event.kind == "cleared":
                known.clear()
            elif event.kind == "stored":
                known.update(event.block_hashes)
            else:
                known.difference_update(event.block_hashes)

    absorb()
    await small.ask(prompt, salt=salt, max_new_tokens=3)
    earlier = set(known)
    absorb()
    if not small.engine.capabilities.kv_events:
        assert not known
        return
    assert known - earlier == set(expected)
    limits = small.engine.limits
    for index in range(limits.block_count * small.block // 192 + 4):  # more than the pool holds: the oldest blocks go
        await small.ask(prompt_of(200, seed=index), max_new_tokens=2)
        absorb()
    assert not known & set(expected)
    (sample,) = await small.ask(prompt, salt=salt, max_new_tokens=2)
    assert sample.cached_token_count == 0
    assert len(known) <= limits.block_count


async def test_work_is_logged_as_intervals(bench: Bench):
    bench.engine.drain_busy()
    await bench.ask(prompt_of(20))
    await asyncio.sleep(1.05)
    intervals = bench.engine.drain_busy()
    assert {interval.kind for interval in intervals} == {"decode", "prefill"}
    assert all(0 < interval.end_s - interval.start_s < 60 for interval in intervals)
    assert bench.engine.drain_busy() == []
