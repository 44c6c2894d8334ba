"""The version keeper, the workers, a router and the runner's client together: updates while requests arrive and die."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.version import PolicyVersion
from tests.integration.workers.conftest import WAIT_S
from tests.integration.workers.keeping import PATIENT, keeping

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
UPDATES, ARRIVALS = 20, 500
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, number] for number in range(20)]


@pytest.mark.timeout(180, func_only=False)
async def test_of_500_arrivals_during_20_updates_none_is_lost_or_reads_older_kv(cluster, start_turns):
    second = await cluster.add_worker("decode", "decode-2")
    await second.serving(V1)
    decoders = [cluster.members[1].engine, second.engine]
    turns = await start_turns()
    last = PolicyVersion(1, 1 + UPDATES)
    async with keeping(cluster, config=PATIENT) as kept:
        await kept.until_serving(V1)
        asked: list[tuple[PolicyVersion, asyncio.Task]] = []

        async def arrive() -> None:
            number = len(asked)
            prompt = PROMPTS[number % len(PROMPTS)]

            def turn(version: PolicyVersion):
                return turns.ask(prompt, f"g{number}", version=version, max_new_tokens=24, deadline_s=60.0)

            asked.append((kept.serving, asyncio.create_task(kept.group(f"g{number}", turn))))
            await asyncio.sleep(0)

        def long(version: PolicyVersion):
            return turns.ask(PROMPTS[0], "long", version=version, max_new_tokens=400, deadline_s=60.0)

        crossing = asyncio.create_task(kept.group("long", long))
        async with asyncio.timeout(WAIT_S):
            while max(engine.load().decoded_tokens for engine in decoders) < 8:  # noqa: ASYNC110 counters have no event
                await asyncio.sleep(0.002)
        for step in range(2, 2 + UPDATES):
            await arrive()  # one at each version, however soon the next one is served
            with ExitStack() as stack:
                for engine in decoders if step == 2 else ():
                    stack.enter_context(engine.between_steps())
                await cluster.publish(PolicyVersion(1, step))
                for _ in range(ARRIVALS // UPDATES - 1):
                    await arrive()
                    await asyncio.sleep(0.002)
                await kept.until_serving(PolicyVersion(1, step), timeout_s=60.0)
        answers = await asyncio.gather(crossing, *(task for _, task in asked))
        applied = kept.keeper.applied
    assert len(asked) == ARRIVALS
    crossed = 0
    for (dispatched, _), turn in zip([(V1, crossing), *asked], answers, strict=True):
        count = 400 if turn is answers[0] else 24
        for rollout in turn.rollouts:
            assert len(rollout.answer) == count
            assert sum(span.token_count for span in rollout.spans) == count
            versions = [PolicyVersion.from_proto(span.version) for span in rollout.spans]
            assert versions == sorted(versions)
            oldest = min(PolicyVersion.from_proto(span.kv_oldest_version) for span in rollout.spans)
            assert dispatched <= oldest <= versions[0]
            crossed += len(set(versions)) > 1
    assert crossed >= 2, "at least both samples of the long one"
    assert applied >= 3 * UPDATES
    versions = {PolicyVersion(1, step) for step in range(1, 1 + UPDATES)}
    assert {dispatched for dispatched, _ in asked} - {last} == versions
    fresh = await turns.ask(PROMPTS[0], "fresh", version=last)
    assert [rollout.answer for rollout in fresh.rollouts] == [cluster.greedy(last, PROMPTS[0], 8)] * 2
    await turns.nothing_left()


async def test_a_salt_ends_with_its_last_group_and_nothing_is_left_under_it(cluster, start_turns):
    prefiller, decoder = cluster.members
    turns = await start_turns()
    async with keeping(cluster) as kept:
        await kept.until_serving(V1)
        point = decoder.engine.points["decode"]
        point.close()
        late = asyncio.create_task(
            kept.group("late", lambda version: turns.ask(PROMPTS[0], "late", version=version, max_new_tokens=64))
        )
        await point.reached()
        await cluster.publish(V2)
        await kept.until_serving(V2)
        await asyncio.sleep(0.3)  # the keeper has told what it had to tell by now
        again = cluster.prefill_request(prefiller, "again", prompt=PROMPTS[0], salt="run/1.1/float32")
        assert (await prefiller.prefill.Prefill(again)).cached_token_count == 8  # its group runs: its prefix is there
        prefiller.engine.release_kv("again")
        updates = [member.engine.updates for member in (prefiller, decoder)]
        point.open()
        await late
        async with asyncio.timeout(WAIT_S):
            while await _cached(cluster, prefiller):  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.02)
        assert [member.engine.updates for member in (prefiller, decoder)] == updates
        await turns.nothing_left()
        assert [member.engine.load().dead_kv_bytes for member in (prefiller, decoder)] == [0, 0]


async def _cached(cluster, prefiller) -> int:
    """Blocks that can be hit under the salt of the first version, by the worker's own cache events."""
    from slipstream.engine.hashing import block_hashes

    hashes = block_hashes("run/1.1/float32", PROMPTS[0][:-1], 4)
    held = prefiller.worker.kv_events._held
    return sum(block_hash in held for block_hash in hashes)


async def test_a_worker_that_dies_in_its_swap_holds_nobody_up_and_is_refitted_when_it_is_back(cluster, start_turns):
    decoder = cluster.members[1]
    second = await cluster.add_worker("decode", "decode-2")
    await second.serving(V1)
    turns = await start_turns()
    async with keeping(cluster) as kept:
        await kept.until_serving(V1)
        point = decoder.engine.points["update"]
        point.close()
        await cluster.publish(V2)
        await point.reached()
        cluster.members.remove(decoder)
        await decoder.server.stop(None)
        await kept.until_serving(V2)
        point.open()
        await decoder.stop()
        assert [len(each.answer) for each in (await turns.ask(PROMPTS[0], version=V2)).rollouts] == [8, 8]
        restarted = await cluster.restart(decoder)
        await restarted.serving(V2)
        async with asyncio.timeout(30):
            while not (await turns.workers())["decode-1"].routable:  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.02)
        assert (await restarted.describe()).state == worker_pb2.WORKER_STATE_SERVING


async def test_a_keeper_that_dies_in_an_update_is_followed_by_another(cluster):
    """Its updates end by their leases, or by themselves; the next keeper finds the workers and goes on."""
    decoder = cluster.members[1]
    point = decoder.engine.points["update"]
    async with keeping(cluster, "first") as kept:
        await kept.until_serving(V1)
        point.close()
        await cluster.publish(V2)
        await point.reached()
    await cluster.publish(V3)
    point.open()
    async with keeping(cluster, "second") as kept:
        await kept.until_serving(V3)
    for member in cluster.members:
        described = await member.describe()
        assert (described.state, PolicyVersion.from_proto(described.version)) == (
            worker_pb2.WORKER_STATE_SERVING,
            V3,
        )
