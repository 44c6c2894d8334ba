"""Later turns of a rollout, and conversations that leave it: the KV and routes they find, the weights they see."""

from __future__ import annotations

import numpy as np

from slipstream.common.version import PolicyVersion
from tests.integration.workers.keeping import keeping
from tests.integration.workers.rows import oracle_rows, read

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
PROMPT = np.random.default_rng(5).integers(0, 23, 60).tolist()
BLOCK_TOKENS = 4


async def test_later_turns_and_branches_hit_the_prefix_and_have_all_rows(cluster, start_turns):
    turns = await start_turns(remote_prefill_min_uncached_tokens=32)
    conversation = await turns.ask(PROMPT, samples=1)
    (rollout,) = conversation.rollouts
    cached = [rollout.cached_token_count]
    for token_ids in ([7, 8, 9], [1, 2], [3]):
        told = len(rollout.token_ids)
        await turns.until_warm([*rollout.token_ids, *token_ids])
        await turns.reply(conversation, 0, token_ids)
        cached.append(rollout.cached_token_count)
        # All whole blocks of the turn before are there, those that it sampled, too, but for the last token's.
        assert cached[-1] - cached[-2] >= (told - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    shared = rollout.sampled[1][1]
    branch = rollout.branch(shared, [5, 6])
    conversation.add(1, branch)
    await turns.until_warm(branch.token_ids)
    await turns.sample(conversation, 1)
    assert branch.cached_token_count >= (shared - 9) // BLOCK_TOKENS * BLOCK_TOKENS
    assert branch.sampled == [(shared + 2, shared + 10)]
    assert branch.answer == cluster.greedy(V1, branch.token_ids[: shared + 2], 8)
    sequences, moved_bytes = await read(cluster, [(each.token_ids, each.routes) for each in (rollout, branch)])
    row_bytes = cluster.members[1].engine.limits.route_row_bytes
    assert moved_bytes == row_bytes * (len(rollout.token_ids) - 1 + len(branch.token_ids) - shared)  # shared ones once
    for sequence in sequences:
        assert not sequence.routes.unknown_ranges
        assert np.array_equal(np.sort(sequence.routes.rows, -1), oracle_rows(cluster, sequence.token_ids.tolist()))
    await turns.nothing_left()


async def test_each_turn_says_which_weights_sampled_it(cluster, start_turns):
    turns = await start_turns()
    async with keeping(cluster) as kept:
        await kept.until_serving(V1)

        async def converse(version: PolicyVersion):
            conversation = await turns.ask(PROMPT, version=version, samples=1)
            await cluster.publish(V2)
            await kept.until_serving(V2)
            await turns.reply(conversation, 0, [7, 8, 9])
            return conversation

        conversation = await kept.group("g", converse)
    (rollout,) = conversation.rollouts
    spans = [(span.token_count, PolicyVersion.from_proto(span.version)) for span in rollout.spans]
    assert spans == [(8, V1), (8, V2)]
    assert {PolicyVersion.from_proto(span.kv_oldest_version) for span in rollout.spans} == {V1}
    await turns.nothing_left()
