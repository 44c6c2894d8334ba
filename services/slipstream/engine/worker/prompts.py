"""Requests on the wire as the engine wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import PrefixUnknown
from slipstream.engine.base import SampleChunk, Sampling
from slipstream.engine.worker.telemetry import logprobs_unknown

_FINISH = {
    "": types_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "aborted": types_pb2.FINISH_REASON_ABORTED,
}


def prompt_tokens(prompt: prefill_pb2.Prompt) -> list[int]:
    """All tokens of a prompt. Bases are not kept by this engine, so one that is named is unknown."""
    if prompt.base_token_count:
        raise PrefixUnknown("send all tokens", rollout_id=prompt.rollout_id)
    return list(prompt.new_token_ids)


def sampling_from_proto(message: types_pb2.Sampling) -> Sampling:
    return Sampling(
        max_new_tokens=message.max_new_tokens,
        seed=message.seed,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        stop_token_ids=tuple(message.stop_token_ids),
    )


UNKNOWN_LOGPROB = 1.0
"""No log-probability is above 0, so whatever is stands for "unknown"."""


def known_logprobs(logprobs: Sequence[float]) -> list[float]:
    """What an engine may not say of a token it sampled becomes unknown, and is counted."""
    checked = [value if math.isfinite(value) and value <= 0 else UNKNOWN_LOGPROB for value in logprobs]
    logprobs_unknown.inc(checked.count(UNKNOWN_LOGPROB))
    return checked


def chunk_to_proto(chunk: SampleChunk, routes: types_pb2.RowsRef | None) -> decode_pb2.SampleChunk:
    oldest = chunk.kv_oldest_version.to_proto()
    spans = [
        types_pb2.VersionSpan(token_count=count, version=version.to_proto(), kv_oldest_version=oldest)
        for count, version in chunk.versions
    ]
    return decode_pb2.SampleChunk(
        sample_index=chunk.sample_index,
        token_ids=chunk.token_ids,
        logprobs=known_logprobs(chunk.logprobs),
        spans=spans,
        finish_reason=_FINISH[chunk.finish_reason],
        cached_token_count=chunk.cached_token_count,
        routes=routes,
    )
