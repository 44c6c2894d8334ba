"""What packing promises, for any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.packing import pack
from slipstream.trainer.parallel.slices import padded_count

LENGTHS = st.lists(st.integers(1, 90), max_size=60)


@given(LENGTHS, st.integers(1, 128), st.integers(1, 5))
def test_every_sequence_is_packed_once_within_the_budget(lengths, max_tokens, rank_count):
    ranks = pack(lengths, max_tokens, rank_count)
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= 1 or sum(lengths[index] for index in batch) <= max_tokens


@given(LENGTHS, st.integers(1, 128), st.integers(1, 5))
def test_every_rank_gets_the_same_number_of_micro_batches(lengths, max_tokens, rank_count):
    ranks = pack(lengths, max_tokens, rank_count)
    assert len(ranks) == rank_count
    assert len({len(rank) for rank in ranks}) == 1
    full = sum(1 for rank in ranks for batch in rank if batch)
    assert len(ranks[0]) == -(-full // rank_count)


@given(LENGTHS, st.integers(90, 256))
def test_no_two_micro_batches_could_share_one_without_breaking_the_order(lengths, max_tokens):
    """Their number is at most twice the least possible one."""
    (batches,) = pack(lengths, max_tokens)
    assert len(batches) <= 2 * -(-sum(lengths) // max_tokens)


DEMO_LENGTHS = [12 + (7 * index * index + index) % 17 for index in range(256)]
"""As the demo's: 256 sequences of 12 to 28 tokens, in micro-batches of 2,048."""


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("rank_count", [1, 2, 4])
def test_packed_rows_are_hardly_padded(rank_count, context):
    plan = pack(DEMO_LENGTHS, 2048, rank_count)
    inputs = [sum(DEMO_LENGTHS[index] - 1 for index in batch) for rank in plan for batch in rank]
    assert 1 - sum(inputs) / sum(padded_count(count, context) for count in inputs) <= 0.03


@pytest.mark.parametrize("rank_count", [1, 2, 3, 4, 8])
def test_ranks_share_a_step_evenly(rank_count):
    lengths = DEMO_LENGTHS
    plan = pack(lengths, 2048, rank_count)
    tokens = [[sum(lengths[index] for index in batch) for batch in rank] for rank in plan]
    slowest = sum(max(rank[position] for rank in tokens) for position in range(len(tokens[0])))
    # What ranks wait for each other at every micro-batch, as a part of what all of them could compute meanwhile.
    assert 1 - sum(lengths) / (slowest * rank_count) <= 0.03
