"""Turns of groups through router, prefill and decode workers, while prefill workers die around the transfer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest_asyncio

from slipstream.common.errors import DeadlineExceeded
from slipstream.common.version import PolicyVersion
from tests.integration.workers.holding import Wire
from tests.integration.workers.turns import refused

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
LONG_PROMPT = np.random.default_rng(5).integers(0, 23, 400).tolist()
"""Its KV is 100 KiB."""


def tokens(turn) -> list[list[int]]:
    return [rollout.answer for rollout in turn.rollouts]


def prompt_rows(turn) -> Any:
    """Where the routes of the prompt are."""
    return turn.rollouts[0].routes[0]


@pytest_asyncio.fixture
async def wires(cluster):
    """Two prefill workers, and the wires over which decode workers get their KV."""
    wires = []
    for member in (cluster.members[0], await second_prefiller(cluster)):
        wires.append(Wire(member))
        await wires[-1].start()
    yield wires
    for wire in wires:
        await wire.stop()


async def first_reached(points) -> int:
    """Which of several points somebody came to first. The others are opened."""
    waiting = [asyncio.create_task(point.reached()) for point in points]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    first = next(index for index, task in enumerate(waiting) if task.done())
    for index, (task, point) in enumerate(zip(waiting, points, strict=True)):
        task.cancel()
        if index != first:
            point.open()
    return first


async def second_prefiller(cluster):
    member = await cluster.add_worker("prefill", "prefill-2")
    await member.serving(V1)
    return member


async def test_a_turn_equals_the_plain_loop_and_leaves_nothing(cluster, start_turns):
    turns = await start_turns()
    turn = await turns.ask(LONG_PROMPT)
    assert tokens(turn) == [cluster.greedy(V1, LONG_PROMPT, 8)] * 2
    assert prompt_rows(turn).key == "p/g.1.1"
    await turns.nothing_left()


async def test_short_prompts_and_warm_prefixes_stay_with_their_decode_worker(cluster, start_turns):
    """The threshold counts tokens that the decode worker lacks, by its own cache events."""
    prefiller, decoder = cluster.members
    turns = await start_turns(remote_prefill_min_uncached_tokens=32)

    def prefilled() -> tuple[int, int]:
        return tuple(member.engine.load().prefilled_tokens for member in (prefiller, decoder))

    prompt = LONG_PROMPT[:100]
    cold = await turns.ask(prompt, "cold")
    assert tokens(cold) == [cluster.greedy(V1, prompt, 8)] * 2
    assert prefilled() == (99, 0)
    short = await turns.ask(prompt[50:80], "short")
    assert prefilled() == (99, 29)
    assert tokens(short) == [cluster.greedy(V1, prompt[50:80], 8)] * 2
    assert prompt_rows(short).key == "d/short.1.1"
    rollout = cold.rollouts[0]
    longer = [*rollout.token_ids, *LONG_PROMPT[:20]]
    await turns.until_warm(longer)
    await turns.reply(cold, 0, LONG_PROMPT[:20])
    assert prefilled() == (99, 29 + 23)  # whole blocks are there, what it sampled but for the last token, too
    assert (rollout.answer, rollout.cached_token_count) == (cluster.greedy(V1, longer, 8), 104)
    alike = [*prompt, *LONG_PROMPT[:28]]
    await turns.until_warm(alike)
    other = await turns.ask(alike, "another rollout")  # of which nobody has routes: once more, where the KV is
    assert prefilled() == (99, 29 + 23 + 127)
    assert (tokens(other), other.rollouts[0].cached_token_count) == ([cluster.greedy(V1, alike, 8)] * 2, 0)
    await turns.ask([*longer, *LONG_PROMPT[:64]], "warm but long")
    assert prefilled()[0] > 99
    await turns.ask(longer, "another version", version=PolicyVersion(1, 0))
    assert prefilled()[0] > 99 + 127  # as many tokens, under another salt
    await turns.nothing_left()


async def test_without_a_prefill_pool_the_decode_worker_computes_prompts(cluster, start_turns):
    prefiller, _ = cluster.members
    await cluster.kill(prefiller)
    turns = await start_turns()
    turn = await turns.ask(LONG_PROMPT)
    assert tokens(turn) == [cluster.greedy(V1, LONG_PROMPT, 8)] * 2
    assert turn.rollouts[0].routes
    await turns.nothing_left()


async def test_a_prefill_worker_that_dies_before_the_transfer_is_replaced_by_the_other(cluster, start_turns):
    prefillers = [cluster.members[0], await second_prefiller(cluster)]
    turns = await start_turns()
    points = [member.engine.points["prefill"] for member in prefillers]
    for point in points:
        point.close()
    running = asyncio.create_task(turns.ask(LONG_PROMPT))
    dying = prefillers[await first_reached(points)]
    await cluster.kill(dying)
    turn = await running
    assert tokens(turn) == [cluster.greedy(V1, LONG_PROMPT, 8)] * 2
    assert (prompt_rows(turn).key, prompt_rows(turn).holder) == ("p/g.1.1~1", cluster.members[-1].address)
    await turns.nothing_left()


async def test_a_prefill_worker_that_dies_during_the_transfer_is_replaced_by_the_other(cluster, start_turns, wires):
    decoder = cluster.members[1]
    turns = await start_turns()
    for wire in wires:
        wire.hold_after(20_000)
    running = asyncio.create_task(turns.ask(LONG_PROMPT))
    broken = wires[await first_reached([wire.held for wire in wires])]
    assert decoder.engine.load().blocks_used == 0  # a prompt that is on its way holds nothing
    await cluster.kill(broken.member)
    broken.cut()
    turn = await running
    assert tokens(turn) == [cluster.greedy(V1, LONG_PROMPT, 8)] * 2
    assert prompt_rows(turn).key == "p/g.1.1~1"
    await turns.nothing_left()


async def test_a_prefill_worker_that_dies_after_the_transfer_is_not_missed(cluster, start_turns):
    prefiller, decoder = cluster.members
    turns = await start_turns()
    running = asyncio.create_task(turns.ask(LONG_PROMPT, max_new_tokens=100))
    async with asyncio.timeout(60):
        while not decoder.engine.load().running_samples:  # noqa: ASYNC110 counters have no event
            await asyncio.sleep(0.001)
    await cluster.kill(prefiller)
    turn = await running
    assert tokens(turn) == [cluster.greedy(V1, LONG_PROMPT, 100)] * 2
    # nobody holds them any more: the trainer routes those positions live
    assert prompt_rows(turn).holder_epoch == prefiller.epoch
    assert decoder.engine.load().prefilled_tokens == 0
    await turns.nothing_left()


async def test_with_no_prefill_worker_left_a_turn_ends_at_its_deadline_with_a_reason(cluster, start_turns):
    prefiller, decoder = cluster.members
    turns = await start_turns()
    prefiller.engine.points["prefill"].close()
    running = asyncio.create_task(refused(turns.ask(LONG_PROMPT, deadline_s=5.0)))
    await prefiller.engine.points["prefill"].reached()
    await cluster.kill(prefiller)
    async with asyncio.timeout(30):
        error = await running
    assert isinstance(error, DeadlineExceeded)
    assert "before the group's deadline" in error.message
    assert decoder.engine.load().decoded_tokens == 0
    await turns.nothing_left()


async def test_a_restarted_peer_is_never_asked_by_what_its_earlier_life_gave_out(cluster, start_turns, wires):
    """The new life even has KV of that name, of another prompt: the epoch in the handle tells them apart."""
    second = cluster.members[-1]
    await cluster.kill(second)
    prefiller, wire = cluster.members[0], wires[0]
    turns = await start_turns()
    wire.hold_after(0)
    running = asyncio.create_task(turns.ask(LONG_PROMPT))
    await wire.held.reached()
    await cluster.kill(prefiller)
    restarted = await cluster.restart(prefiller)
    await restarted.serving(V1)
    assert restarted.address == prefiller.address
    other = cluster.prefill_request(restarted, "g.1.1", prompt=LONG_PROMPT[::-1])
    assert (await restarted.prefill.Prefill(other)).kv.transfer_id == "g.1.1"
    wire.cut()
    turn = await running
    assert tokens(turn) == [cluster.greedy(V1, LONG_PROMPT, 8)] * 2
    assert prompt_rows(turn).key.startswith("p/g.1.1~")
    assert prompt_rows(turn).holder_epoch == restarted.epoch != prefiller.epoch
    assert restarted.engine.release_kv("g.1.1")  # the turn's abort was meant for the earlier life
    await turns.nothing_left()


async def test_a_retrained_step_hits_nothing_of_the_dead_one_though_its_kv_is_held(cluster, start_turns, refusal):
    """The same group, attempt and step, of the next incarnation, while a handle of the dead one is still out."""
    prefiller, decoder = cluster.members
    turns = await start_turns()
    dead = await turns.ask(LONG_PROMPT)
    orphan = cluster.prefill_request(prefiller, "g.1.1", prompt=LONG_PROMPT, salt="run/1.1/float32")
    await prefiller.prefill.Prefill(orphan)  # a runner that died holds it
    retrained = PolicyVersion(2, 1)
    await cluster.publish(retrained, seed=7)
    for member in (decoder, prefiller):
        await member.update(retrained)
    prefilled = prefiller.engine.load().prefilled_tokens
    turn = await turns.ask(LONG_PROMPT, version=retrained)
    assert tokens(turn) == [cluster.greedy(retrained, LONG_PROMPT, 8)] * 2 != tokens(dead)
    assert turn.rollouts[0].cached_token_count == 0
    assert prefiller.engine.load().prefilled_tokens - prefilled == len(LONG_PROMPT) - 1
    assert {span.kv_oldest_version.incarnation for rollout in turn.rollouts for span in rollout.spans} == {2}
    based = cluster.prefill_request(prefiller, "based", prompt=[1, 2])
    based.prompt.rollout_id, based.prompt.base_token_count = "g.1.1", 4
    assert await refusal(prefiller.prefill.Prefill(based)) == "PREFIX_UNKNOWN"  # no bases are kept at all
    assert await prefiller.end_salts(retrained) == 1
    await turns.nothing_left()
