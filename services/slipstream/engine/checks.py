"""What every engine refuses, in the same words: requests over a limit, of no capability, or that bias training.

Imports no torch. The message and `metadata["name"]` name the field of `EngineLimits`, `metadata["limit"]` is its value.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.common.errors import ContextTooLong, InvalidRequest, KvMismatch, NoWeights, SamplingBiased, Unsupported
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import (
    FRAMES,
    DecodeRequest,
    EngineCapabilities,
    EngineLimits,
    KvHeader,
    KvReference,
    PrefillRequest,
    Sampling,
)
from slipstream.engine.hashing import prompt_of


def check_prompt(
    token_ids: Sequence[int], new_token_count: int, version: PolicyVersion | None, limits: EngineLimits
) -> None:
    """Refuse a prompt that cannot be computed, alone or with as many tokens after it."""
    if version is None:
        raise NoWeights("the engine has no weights yet")
    if not token_ids:
        raise InvalidRequest("the prompt is empty", field="token_ids")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        raise _over("token_ids", "vocab_size", limits.vocab_size)
    if len(token_ids) + new_token_count > limits.max_context_tokens:
        raise ContextTooLong(
            f"{len(token_ids)} + {new_token_count} tokens exceed max_context_tokens = {limits.max_context_tokens}",
            name="max_context_tokens",
            limit=limits.max_context_tokens,
        )


def check_prefill(
    request: PrefillRequest, version: PolicyVersion | None, limits: EngineLimits, capabilities: EngineCapabilities
) -> None:
    """Raise what `Engine.prefill` raises at once."""
    check_prompt(request.token_ids, 0, version, limits)
    require(capabilities, "prefills")
    if request.capture_routes:
        require(capabilities, "captures_routes")


def check_decode(
    request: DecodeRequest, version: PolicyVersion | None, limits: EngineLimits, capabilities: EngineCapabilities
) -> None:
    """Raise what `Engine.decode` raises at once, but for what depends on other requests."""
    sampling = request.sampling
    check_prompt(request.token_ids, sampling.max_new_tokens, version, limits)
    if sampling.max_new_tokens < 1 or not request.sample_ids:
        raise InvalidRequest("nothing to sample", field="max_new_tokens")
    if len(request.sample_ids) > limits.max_samples:
        raise _over("sample_ids", "max_samples", limits.max_samples)
    if len(set(request.sample_ids)) < len(request.sample_ids):
        raise InvalidRequest("two samples have the same id", field="sample_ids")
    indexes = request.sample_indexes
    if indexes and (not len(indexes) == len(set(indexes)) == len(request.sample_ids) or min(indexes) < 0):
        raise InvalidRequest("not one index for each sample, each another", field="sample_indexes")
    if len(sampling.stop_token_ids) > limits.max_stop_token_ids:
        raise _over("stop_token_ids", "max_stop_token_ids", limits.max_stop_token_ids)
    if any(not 0 <= token_id < limits.vocab_size for token_id in sampling.stop_token_ids):
        raise _over("stop_token_ids", "vocab_size", limits.vocab_size)
    if request.for_training:
        check_unbiased(sampling)
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        require(capabilities, "truncates_sampling")
    if request.capture_routes:
        require(capabilities, "captures_routes")
    if request.kv is not None:
        require_transport(capabilities, request.kv.transport if isinstance(request.kv, KvReference) else FRAMES)
        _check_kv(request, request.kv if isinstance(request.kv, KvReference) else request.kv.header)


def _check_kv(request: DecodeRequest, kv: KvReference | KvHeader) -> None:
    """Refuse KV that was not computed of this prompt under this salt: it would be cached under the hashes of both."""
    for name, theirs, ours in (
        ("token_count", kv.token_count, len(request.token_ids) - 1),
        ("salt", kv.salt, request.salt),
        ("prompt_hash", kv.prompt_hash, prompt_of(request)),
    ):
        if theirs != ours:
            raise KvMismatch(f"KV is of {name} {theirs!r}, and the prompt's is {ours!r}", field=name)


def check_unbiased(sampling: Sampling) -> None:
    """Refuse to cut tokens off where the loss divides by the probabilities of the whole vocabulary."""
    if sampling.temperature == 0:
        return  # greedy: nothing is drawn
    for name, truncates in (
        ("top_p", sampling.top_p < 1),
        ("top_k", sampling.top_k > 0),
        ("min_p", sampling.min_p > 0),
    ):
        if truncates:
            raise SamplingBiased(
                f"{name} cuts tokens off, and the training ratio of what is left would be biased", field=name
            )


def require(capabilities: EngineCapabilities, name: str) -> None:
    """Refuse what this engine cannot do."""
    if not getattr(capabilities, name):
        raise Unsupported(f"this engine does not do that: {name}", method=name, capability=name)


def require_transport(capabilities: EngineCapabilities, transport: str) -> None:
    """Refuse KV that comes by a way this engine does not have."""
    if transport not in capabilities.kv_transports:
        has = ", ".join(capabilities.kv_transports) or "none"
        raise _no_transport(f"this engine moves no KV by {transport}; kv_transports: {has}")


def no_connector() -> Unsupported:
    """What asking for a lease is answered where KV leaves in frames, or not at all."""
    return _no_transport("KV of this engine does not move by a connector: see kv_transports")


def no_frames() -> Unsupported:
    """What asking for bytes is answered where KV moves by a connector, or not at all."""
    return _no_transport(f"KV of this engine does not leave as {FRAMES}: see kv_transports")


def _no_transport(message: str) -> Unsupported:
    return Unsupported(message, method="kv_transports", capability="kv_transports")


def _over(field: str, name: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"{field} exceed {name} = {limit}", field=field, name=name, limit=limit)
