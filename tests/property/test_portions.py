"""Portions of a plan: what is fetched, and that it is there when a micro-batch needs it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.trainer.fetch import RefId, ref_id
from slipstream.trainer.portions import cut
from slipstream.trainer.rows import references

refs = st.builds(
    lambda number: types_pb2.RowsRef(holder=f"h{number % 3}", key=f"k{number}", size_bytes=1 + 7 * number % 50),
    st.integers(0, 9),  # few, so that many sequences share them
)
sequences = st.builds(batch_pb2.PlannedSequence, token_ids=refs, logprobs=refs, routes=st.lists(refs, max_size=3))
plans = st.builds(
    lambda batches: batch_pb2.Plan(micro_batches=[batch_pb2.MicroBatch(sequences=batch) for batch in batches]),
    st.lists(st.lists(sequences, max_size=3), max_size=8),
)


@settings(deadline=None)
@given(plans, st.integers(1, 200))
def test_every_row_comes_once_and_is_there_as_long_as_it_is_needed(plan, limit_bytes):
    portions = cut(plan, limit_bytes)
    assert [batch for portion in portions for batch in portion.micro_batches] == list(plan.micro_batches)
    fetched = [key for portion in portions for key in portion.fetched]
    wanted = {ref_id(ref) for batch in plan.micro_batches for each in batch.sequences for ref in references(each)}
    assert sorted(fetched) == sorted(wanted)
    shared: set[RefId] = set()
    for portion in portions:
        here = shared | portion.fetched.keys()
        assert here >= {
            ref_id(ref) for batch in portion.micro_batches for s in batch.sequences for ref in references(s)
        }
        assert portion.size_bytes <= limit_bytes or len(portion.micro_batches) == 1
        shared = portion.kept & here
        assert shared == portion.kept
    assert not shared
