"""Turns whose decode worker goes half-way: they go on elsewhere from the tokens that came, as the same rollouts."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from slipstream.common.config import ListenConfig, WorkerEndpoint
from slipstream.common.version import PolicyVersion
from slipstream.decode.config import DecodeConfig
from slipstream.engine.base import DecodeRequest
from slipstream.runner.rollout import LENGTH, Rollout
from slipstream.runner.turns import Conversation
from tests.integration.workers.conftest import WAIT_S, Cluster, Member
from tests.integration.workers.processes import WorkerProcess
from tests.integration.workers.rows import oracle_rows, read
from tests.integration.workers.turns import Turns
from tests.ports import free_ports

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
PROMPT = np.random.default_rng(3).integers(0, 23, 50).tolist()
COUNT = 300
STEP_S = 0.006
"""What makes a turn last two seconds: tokens are sent once a second."""


async def second_decoder(cluster: Cluster) -> Member:
    member = await cluster.add_worker("decode", "decode-2")
    await member.serving(V1)
    return member


def decoders(cluster: Cluster) -> list[Member]:
    return [member for member in cluster.members if member.worker.identity.replica.startswith("decode")]


async def received(turns: Turns, least_tokens: int = 1) -> str:
    """The address of the decode worker of which a part of the next turn has come, so many tokens of each rollout."""
    first = len(turns.attempts)
    async with asyncio.timeout(WAIT_S):
        while True:
            for attempt in turns.attempts[first:]:
                counts = [len(segment.token_ids) for segment in attempt.segments.values()]
                if attempt.placement is not None and min(counts) >= least_tokens:
                    return attempt.placement.decode.address
            await asyncio.sleep(0.01)


async def sending(cluster: Cluster, turns: Turns, least_tokens: int = 1) -> Member:
    """The decode worker that has sent a part of the next turn."""
    address = await received(turns, least_tokens)
    return next(member for member in decoders(cluster) if member.address == address)


def slow(cluster: Cluster) -> None:
    for member in decoders(cluster):
        member.engine.pace(STEP_S)


def answers(turn: Conversation) -> list[list[int]]:
    return [rollout.answer for rollout in turn.rollouts]


def check_continuations(requests: list[DecodeRequest], turn: Conversation, count: int = COUNT) -> list[int]:
    """What was asked for, one request a rollout, begins where the tokens end that came. Returns how many those were."""
    assert sorted(index for request in requests for index in request.sample_indexes) == list(range(len(turn.rollouts)))
    kept = {}
    for request in requests:
        (index,) = request.sample_indexes
        rollout = turn.rollouts[index]
        kept[index] = len(request.token_ids) - rollout.prompt_token_count
        assert list(request.token_ids) == rollout.token_ids[: len(request.token_ids)]
        assert request.sampling.max_new_tokens == count - kept[index]
        assert request.salt == "run/1.1/float32"
    return [kept[index] for index in sorted(kept)]


async def check_rows(cluster: Cluster, rollouts: list[Rollout], moved_positions: int) -> None:
    """Every row is known, is that of the forward pass, and moves once."""
    sequences, moved_bytes = await read(cluster, [(each.token_ids, each.routes) for each in rollouts])
    for sequence in sequences:
        assert sequence.routes.unknown_ranges == ()
        assert np.array_equal(np.sort(sequence.routes.rows, -1), oracle_rows(cluster, sequence.token_ids.tolist()))
    assert moved_bytes == decoders(cluster)[0].engine.limits.route_row_bytes * moved_positions


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_a_turn_whose_decode_worker_dies_ends_as_though_nothing_had_happened(cluster, start_turns, temperature):
    """Token for token, sampled ones too: a draw is that of a seed, an index and a position, wherever it is made."""
    await second_decoder(cluster)
    turns = await start_turns()
    fields: dict[str, Any] = {"samples": 3, "max_new_tokens": COUNT, "temperature": temperature, "seed": 11}
    fields["deadline_s"] = 60.0
    whole = await turns.ask(PROMPT, "whole", **fields)
    slow(cluster)
    running = asyncio.create_task(turns.ask(PROMPT, "broken", **fields))
    dying = await sending(cluster, turns, least_tokens=22)  # a first part is small where the machine stood still
    await cluster.kill(dying)
    turn = await running
    assert answers(turn) == answers(whole)
    assert len({tuple(answer) for answer in answers(turn)}) == (3 if temperature else 1)
    (other,) = decoders(cluster)
    kept = check_continuations([each for each in other.engine.decodes if "broken" in each.request_id], turn)
    assert min(kept) > 20
    for rollout, plain, count in zip(turn.rollouts, whole.rollouts, kept, strict=True):
        assert (rollout.finish_reason, rollout.sampled) == (LENGTH, [(len(PROMPT), len(PROMPT) + COUNT)])
        assert np.allclose(rollout.logprobs, plain.logprobs, atol=1e-4)
        assert sum(span.token_count for span in rollout.spans) == COUNT
        asked = len(PROMPT) - 1 + count
        first = len(PROMPT) - 1 if rollout is turn.rollouts[0] else 0
        assert rollout.prefix_query_token_count == first + asked  # siblings ask for their prompt together
        assert rollout.cached_token_count <= rollout.prefix_query_token_count
    await check_rows(cluster, turn.rollouts, len(PROMPT) - 1 + 3 * COUNT)
    await turns.nothing_left()


async def test_rows_of_a_prompt_that_died_with_its_decode_worker_come_again(cluster, start_turns):
    await second_decoder(cluster)
    await cluster.kill(cluster.members[0])
    turns = await start_turns()
    slow(cluster)
    running = asyncio.create_task(turns.ask(PROMPT, samples=1, max_new_tokens=COUNT))
    await cluster.kill(await sending(cluster, turns))
    turn = await running
    assert decoders(cluster)[0].engine.decodes[0].first_route_position == 0
    await check_rows(cluster, turn.rollouts, len(PROMPT) - 1 + COUNT)
    await turns.nothing_left()


async def test_rows_of_tokens_that_other_weights_computed_again_are_unknown(cluster, start_turns):
    """The dead worker had those of the first time; the rest of the rollout is of the new weights, and says so."""
    await second_decoder(cluster)
    turns = await start_turns()
    slow(cluster)
    prompt = PROMPT[:4]  # shorter than a block, so that nothing is cached: all KV is the new weights'
    running = asyncio.create_task(turns.ask(prompt, samples=1, max_new_tokens=COUNT))
    dying = await sending(cluster, turns, least_tokens=22)
    with dying.engine.between_steps():
        await cluster.publish(V2)
        for member in cluster.members:
            if member is not dying:
                await member.update(V2)
        await cluster.kill(dying)
    (rollout,) = (await running).rollouts
    old, new = rollout.spans
    versions = [
        (PolicyVersion.from_proto(s.version), PolicyVersion.from_proto(s.kv_oldest_version)) for s in (old, new)
    ]
    assert versions == [(V1, V1), (V2, V2)]
    assert (old.token_count + new.token_count, old.token_count > 20) == (COUNT, True)
    end = len(prompt) + old.token_count
    assert rollout.answer[: old.token_count][:20] == cluster.greedy(V1, prompt, 20)
    assert rollout.token_ids[end : end + 20] == cluster.greedy(V2, rollout.token_ids[:end], 20)
    (sequence,), _ = await read(cluster, [(rollout.token_ids, rollout.routes)])
    assert sequence.routes.unknown_ranges == ((len(prompt) - 1, end - 1),)
    await turns.nothing_left()


async def test_tokens_of_a_worker_that_failed_an_update_are_those_of_the_weights_it_kept(cluster, start_turns):
    """It is stale and gets no more turns; those it has go on with weights that passed their checks, and are good."""
    await second_decoder(cluster)
    turns = await start_turns()
    whole = await turns.ask(PROMPT, "whole", samples=1, max_new_tokens=COUNT)
    slow(cluster)
    running = asyncio.create_task(turns.ask(PROMPT, samples=1, max_new_tokens=COUNT))
    failing = await sending(cluster, turns)
    with failing.engine.between_steps():
        await cluster.publish(V2, probe_error=0.5)
        with pytest.raises(Exception, match="probe"):
            await failing.update(V2)
        assert failing.worker.updates.stale_reason
        await cluster.kill(failing)
    turn = await running
    assert answers(turn) == answers(whole)
    (other,) = decoders(cluster)
    check_continuations([request for request in other.engine.decodes if request.request_id.startswith("g.")], turn)
    assert {PolicyVersion.from_proto(span.version) for span in turn.rollouts[0].spans} == {V1}
    await turns.nothing_left()


async def test_a_turn_that_its_worker_aborts_keeps_the_rows_it_was_given(cluster, start_turns):
    await second_decoder(cluster)
    turns = await start_turns()
    whole = await turns.ask(PROMPT, "whole", samples=2, max_new_tokens=COUNT, temperature=1.0)
    slow(cluster)
    running = asyncio.create_task(turns.ask(PROMPT, samples=2, max_new_tokens=COUNT, temperature=1.0))
    worker = await sending(cluster, turns)
    assert await worker.engine.abort("g.1.1") == 2
    turn = await running
    assert answers(turn) == answers(whole)
    (other,) = (member for member in decoders(cluster) if member is not worker)
    requests = [request for request in other.engine.decodes if request.request_id.startswith("g.")]
    kept = check_continuations(requests, turn)
    assert sorted(request.first_route_position for request in requests) == sorted(len(PROMPT) - 1 + n for n in kept)
    assert [len(rollout.routes) for rollout in turn.rollouts] == [3, 3]  # the prompt's, and of both workers
    await check_rows(cluster, turn.rollouts, len(PROMPT) - 1 + 2 * COUNT)
    await turns.nothing_left()


async def test_a_rollout_of_several_turns_moves_each_row_once_though_a_worker_dies_in_one(cluster, start_turns):
    await second_decoder(cluster)
    turns = await start_turns()
    said = [[7, 8, 9], [1, 2], [3]]

    async def converse(name: str, breaks: bool) -> Conversation:
        conversation = await turns.ask(PROMPT, name, samples=2, max_new_tokens=100, temperature=1.0)
        for number, token_ids in enumerate(said):
            breaking = breaks and number == 1
            if breaking:
                for member in decoders(cluster):
                    member.engine.pace(3 * STEP_S)
            replying = asyncio.create_task(turns.reply(conversation, 1, token_ids))
            if breaking:
                await cluster.kill(await sending(cluster, turns))
            await replying
        return conversation

    whole = await converse("whole", breaks=False)
    broken = await converse("broken", breaks=True)
    for rollout, plain in zip(broken.rollouts, whole.rollouts, strict=True):
        assert rollout.token_ids == plain.token_ids
        assert rollout.sampled == plain.sampled
        assert np.allclose(rollout.logprobs, plain.logprobs, atol=1e-4)
    rollout = whole.rollouts[1]
    bounds = [end for _, end in rollout.sampled]
    assert [start - end for (start, _), end in zip(rollout.sampled[1:], bounds[:-1], strict=True)] == [3, 2, 1]
    await turns.nothing_left()
    tokens = len(broken.rollouts[1].token_ids)
    (sequence,), moved_bytes = await read(cluster, [(broken.rollouts[1].token_ids, broken.rollouts[1].routes)])
    lost = sum(end - start for start, end in sequence.routes.unknown_ranges)
    row_bytes = decoders(cluster)[0].engine.limits.route_row_bytes
    assert moved_bytes == row_bytes * (tokens - 1 - lost)
    known = sequence.routes.known()
    assert np.array_equal(
        np.sort(sequence.routes.rows, -1)[known], oracle_rows(cluster, sequence.token_ids.tolist())[known]
    )
    assert known[rollout.sampled[2][0] :].all()  # of the turns before, the dead worker's rows went with it


@pytest.mark.timeout(180)
async def test_kill_nine_of_a_decode_worker_in_mid_turn_costs_no_token_that_came(empty_cluster, valkey_url):
    """One is a process of its own. It is made to stand still for a second, after which what it has sampled is due."""
    empty_cluster.sizes = empty_cluster.sizes.model_copy(update={"n_layers": 10})
    await empty_cluster.publish(V1)
    empty_cluster.model_dir()
    other = await second_decoder(empty_cluster)
    (port,) = free_ports(1)
    names = {"replica": "decode-1", "broadcaster": f"127.0.0.1:{empty_cluster.port}", "redis_url": valkey_url}
    config = empty_cluster.make_config(DecodeConfig, listen=ListenConfig(port=port), **names)
    dying = WorkerProcess(empty_cluster, config, f"127.0.0.1:{port}")
    dying.start()
    try:
        await dying.up()
        async with AsyncExitStack() as stack:
            turns = Turns(empty_cluster)
            pool = [("decode-1", dying.address), ("decode-2", other.address)]
            workers = [WorkerEndpoint(replica=replica, address=address) for replica, address in pool]
            await turns.start(stack, valkey_url, decode_workers=workers)
            fields: dict[str, Any] = {"samples": 2, "max_new_tokens": 450, "temperature": 1.0, "deadline_s": 90.0}
            coming = asyncio.create_task(received(turns))
            running = asyncio.create_task(turns.ask(PROMPT, "broken", **fields))
            assert await turns.at_work() == "decode-1"
            dying.stand_still()
            await asyncio.sleep(1.2)
            dying.signal(signal.SIGCONT)
            assert await coming == dying.address
            assert not running.done()
            dying.signal(signal.SIGKILL)
            turn = await running
            whole = await turns.ask(PROMPT, "whole", **fields)
            assert answers(turn) == answers(whole)
            assert [rollout.finish_reason for rollout in turn.rollouts] == [LENGTH] * 2
            assert min(check_continuations(other.engine.decodes[:2], turn, 450)) > 0
            await turns.nothing_left()
    finally:
        await dying.stop()
