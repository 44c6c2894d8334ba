"""Slices of a micro-batch hold every token and every target once, whatever the lengths and the ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.routes import RouteRows
from slipstream.trainer.parallel.slices import (
    even_routes,
    input_ranges,
    padded_count,
    rank_index,
    slice_of,
)
from slipstream.trainer.sequence import TrainSequence

LAYERS, TOP_K, EXPERTS = 2, 2, 6


def made(seed: int, length: int, trained: int) -> TrainSequence:
    rng = np.random.default_rng(seed)
    routes = rng.random((length - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
    return TrainSequence(
        token_ids=rng.integers(0, 50, length).astype(np.int32),
        target_positions=np.arange(length - trained, length),
        engine_logps=np.zeros(trained, np.float32),
        sampled_at=np.zeros(trained, np.int64),
        kv_oldest=np.zeros(trained, np.int64),
        routes=RouteRows(routes, 0, ((0, 1),) if seed % 2 else ()),
        advantage=1.0,
    )


sequences = st.lists(
    st.integers(2, 40).flatmap(lambda n: st.builds(made, st.integers(0, 9), st.just(n), st.integers(0, n - 1))),
    max_size=5,
)


@settings(deadline=None)
@given(sequences, st.sampled_from([1, 2, 3, 4]))
def test_every_token_and_every_target_is_in_exactly_one_slice(batch, context):
    parts = [
        slice_of(batch, context=context, rank=rank, moe_layers=LAYERS, top_k=TOP_K, expert_count=EXPERTS)
        for rank in range(context)
    ]
    count = sum(len(s.token_ids) - 1 for s in batch)
    assert len({len(part.index_S) for part in parts}) == 1
    assert len({part.lengths for part in parts}) == 1
    order = np.argsort(np.concatenate([part.index_S for part in parts]))
    whole = {
        name: np.concatenate([getattr(part, name) for part in parts])[order]
        for name in ("index_S", "tokens_S", "positions_S", "real_S", "replay_SLK", "known_S")
    }
    assert (whole["index_S"] == np.arange(padded_count(count, context))).all()
    assert whole["real_S"].sum() == count
    if batch:
        assert (whole["tokens_S"][:count] == np.concatenate([s.token_ids[:-1] for s in batch])).all()
        assert (whole["positions_S"][:count] == np.concatenate([np.arange(len(s.token_ids) - 1) for s in batch])).all()
        assert (whole["replay_SLK"][:count] == np.concatenate([s.routes.rows for s in batch])).all()
        assert (whole["known_S"][:count] == np.concatenate([s.known_N for s in batch])).all()
    targets = np.concatenate([[], *(s.token_ids[s.target_positions] for s in batch)])
    index = np.concatenate([part.target_index_R for part in parts])
    assert sorted(index) == list(range(len(targets)))
    assert (np.concatenate([part.targets_R for part in parts])[np.argsort(index)] == targets).all()
    sources = np.concatenate([[], *(s.token_ids[s.target_positions - 1] for s in batch)])
    assert (np.concatenate([part.tokens_S[part.source_R] for part in parts])[np.argsort(index)] == sources).all()


@settings(deadline=None)
@given(sequences, st.sampled_from([1, 2, 3, 4]))
def test_a_rank_fetches_the_rows_of_its_slice_and_no_others(batch, context):
    lengths = [len(s.token_ids) - 1 for s in batch]
    starts = np.cumsum([0, *lengths])
    for rank in range(context):
        ranges = input_ranges(lengths, context, rank)
        fetched = [start + i for start, each in zip(starts, ranges, strict=False) for a, b in each for i in range(a, b)]
        part = slice_of(batch, context=context, rank=rank, moe_layers=LAYERS, top_k=TOP_K, expert_count=EXPERTS)
        assert sorted(fetched) == part.index_S[part.real_S].tolist()
        assert all(len(each) <= 2 for each in ranges)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 6))
def test_ranks_hold_pieces_that_mirror_each_other(count, context):
    total = padded_count(count, context)
    assert total - count < 2 * context or count == 0
    middles = [rank_index(total, context, rank).mean() for rank in range(context)]
    assert np.allclose(middles, (total - 1) / 2)  # so that causal attention costs all of them the same


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 6), st.integers(6, 12))
def test_padding_spreads_over_all_experts(count, top_k, experts):
    rows = even_routes(count, LAYERS, top_k, experts)
    assert rows.shape == (count, LAYERS, top_k)
    assert (np.diff(np.sort(rows, axis=-1), axis=-1) > 0).all()  # no expert twice
    for layer in range(LAYERS):
        used = np.bincount(rows[:, layer].reshape(-1), minlength=experts)
        assert used.max() - used.min() <= 1
