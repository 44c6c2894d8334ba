"""Expert routes from both pools to the trainer's reader: each row moves once, and is the one of the forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.api.inference.v1 import decode_pb2
from slipstream.api.types.v1 import types_pb2
from tests.integration.workers.rows import V1, oracle_rows, read

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


async def turn(
    cluster: Any, name: str, prompt: list[int], samples: int, first_route_position: int = 0
) -> tuple[list[types_pb2.RowsRef], list[decode_pb2.SampleChunk]]:
    """One turn through both pools: references to the prompt's rows, and the samples."""
    prefiller, decoder = cluster.members
    told = {"prompt": prompt, "first_route_position": first_route_position}
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, name, **told))
    request = cluster.decode_request(decoder, prefilled.kv, name, samples, sampling={"temperature": 1.0}, **told)
    return [prefilled.routes], await cluster.samples(decoder, request)


async def test_siblings_share_the_rows_of_their_prompt(cluster):
    prompt_routes, samples = await turn(cluster, "g.0", PROMPT, 4)
    rollouts = [([*PROMPT, *sample.token_ids], [*prompt_routes, sample.routes]) for sample in samples]
    sequences, moved_bytes = await read(cluster, rollouts)
    row_bytes = cluster.members[0].worker.engine.limits.route_row_bytes
    assert moved_bytes == row_bytes * (len(PROMPT) - 1 + sum(len(sample.token_ids) for sample in samples))
    for sequence in sequences:
        assert sequence.routes.unknown_ranges == ()
        assert np.array_equal(np.sort(sequence.routes.rows, -1), oracle_rows(cluster, sequence.token_ids.tolist()))


async def test_each_row_of_a_rollout_of_several_turns_moves_once(cluster):
    tokens, routes = list(PROMPT), []
    for number in range(3):
        known = sum(ref.ranges[0].end - ref.ranges[0].start for ref in routes)
        prompt_routes, (sample,) = await turn(cluster, f"g{number}.0", tokens, 1, known)
        assert [(r.start, r.end) for r in prompt_routes[0].ranges] == [(known, len(tokens) - 1)]
        routes += [*prompt_routes, sample.routes]
        tokens += [*sample.token_ids, 7, 8, 9, number]  # what the environment says
    tokens = tokens[:-4]
    (sequence,), moved_bytes = await read(cluster, [(tokens, routes)])
    assert moved_bytes == cluster.members[0].worker.engine.limits.route_row_bytes * (len(tokens) - 1)
    assert sequence.routes.unknown_ranges == ()
    assert sequence.routes.recomputed_from is not None  # blocks are whole: the end of a turn is computed again
    assert np.array_equal(np.sort(sequence.routes.rows, -1), oracle_rows(cluster, tokens))


async def test_ids_above_a_byte_travel_in_two(empty_cluster):
    empty_cluster.sizes = empty_cluster.sizes.model_copy(update={"n_experts": 300})
    await empty_cluster.publish(V1)
    for kind in ("prefill", "decode"):
        await (await empty_cluster.add_worker(kind)).serving(V1)
    prompt_routes, (sample,) = await turn(empty_cluster, "g.0", PROMPT, 1)
    assert {prompt_routes[0].dtype, sample.routes.dtype} == {"uint16"}
    tokens = [*PROMPT, *sample.token_ids]
    (sequence,), moved_bytes = await read(empty_cluster, [(tokens, [*prompt_routes, sample.routes])])
    assert moved_bytes == (len(tokens) - 1) * 2 * 2 * 2
    assert sequence.routes.rows.max() > 255
    assert np.array_equal(np.sort(sequence.routes.rows, -1), oracle_rows(empty_cluster, tokens))


async def test_rows_of_transferred_positions_are_unknown_and_never_zeros(cluster):
    """A decode worker does not see the experts of positions whose KV another one computed."""
    _, (sample,) = await turn(cluster, "g.0", PROMPT, 1)
    tokens = [*PROMPT, *sample.token_ids]
    (sequence,), _ = await read(cluster, [(tokens, [sample.routes])])
    assert sequence.routes.unknown_ranges == ((0, len(PROMPT) - 1),)
    assert (sequence.routes.rows[: len(PROMPT) - 1] == 255).all()
