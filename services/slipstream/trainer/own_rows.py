"""Which rows of a plan one context rank fetches: all tokens, and the routes of its own slices."""

from __future__ import annotations

import math

import numpy as np

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.trainer.parallel.slices import input_ranges


def own_rows(plan: batch_pb2.Plan, context: int, rank: int) -> batch_pb2.Plan:
    """The plan with references to no other routes than context rank `rank` of `context` needs."""
    if context == 1:
        return plan
    own = batch_pb2.Plan()
    own.CopyFrom(plan)
    for batch in own.micro_batches:
        lengths = [max(0, planned.token_count - 1) for planned in batch.sequences]
        for planned, ranges in zip(batch.sequences, input_ranges(lengths, context, rank), strict=True):
            refs = [_between(ref, start, end) for ref in planned.routes for start, end in ranges]
            del planned.routes[:]
            planned.routes.extend(ref for ref in refs if ref.ranges)
    return own


def _between(ref: types_pb2.RowsRef, start: int, end: int) -> types_pb2.RowsRef:
    """The rows of positions `[start, end)`; no ranges where it has none of them."""
    cut = types_pb2.RowsRef()
    cut.CopyFrom(ref)
    del cut.ranges[:]
    if ref.ranges:  # holders give all rows from the first position asked for to the last
        start, end = max(start, ref.ranges[0].start), min(end, ref.ranges[-1].end)
        if start < end:
            cut.ranges.add(start=start, end=end)
            cut.size_bytes = (end - start) * math.prod(ref.row_shape) * np.dtype(ref.dtype).itemsize
    return cut
