"""What crosses the edge between engine and wire."""

from __future__ import annotations

import math

from slipstream.common.version import PolicyVersion
from slipstream.engine.base import SampleChunk
from slipstream.engine.worker.prompts import UNKNOWN_LOGPROB, chunk_to_proto
from slipstream.engine.worker.telemetry import logprobs_unknown

V1 = PolicyVersion(1, 0)


def test_what_is_no_log_probability_is_unknown_and_counted_and_its_neighbours_stay():
    values = [-1.5, math.nan, 0.0, 1e-6, -math.inf, math.inf, -0.25]
    counted = logprobs_unknown._value.get()
    message = chunk_to_proto(SampleChunk(0, list(range(7)), values, [(7, V1)], V1), None)
    unknown = UNKNOWN_LOGPROB
    assert list(message.logprobs) == [-1.5, unknown, 0.0, unknown, unknown, unknown, -0.25]
    assert logprobs_unknown._value.get() - counted == 4
