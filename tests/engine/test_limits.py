"""What is over a limit is refused at once, by an error that names the limit; so is what an engine cannot do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from slipstream.common.errors import (
    ContextTooLong,
    EngineFull,
    InvalidRequest,
    RequestIdReused,
    SlipstreamError,
    Unsupported,
)
from slipstream.engine.base import FRAMES, DecodeRequest, KvHeader, KvPayload, KvReference
from tests.engine.bench import Bench, prompt_of, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def over(bench: Bench, name: str) -> tuple[DecodeRequest, type[SlipstreamError]]:
    """A request one over the limit of that name."""
    limits = bench.engine.limits
    short, limit = prompt_of(5), getattr(limits, name)
    if name == "max_context_tokens":
        return bench.request(short, max_new_tokens=limit - 4), ContextTooLong
    if name == "vocab_size":
        return bench.request([*short, limit]), InvalidRequest
    if name == "max_samples":
        return bench.request(short, limit + 1), InvalidRequest
    return bench.request(short, stop_token_ids=tuple(range(limit + 1))), InvalidRequest


@pytest.mark.parametrize("name", ["max_context_tokens", "vocab_size", "max_samples", "max_stop_token_ids"])
async def test_a_request_over_a_limit_is_refused_by_the_limits_name(bench: Bench, name):
    request, expected = over(bench, name)
    steps = bench.engine.load().decode_steps
    with pytest.raises(expected):
        bench.engine.check(request)
    with pytest.raises(expected) as refused:
        await bench.run(request)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert name in refused.value.message
    assert refused.value.metadata["name"] == name
    assert refused.value.metadata["limit"] == str(getattr(bench.engine.limits, name))
    assert bench.engine.load().decode_steps == steps


async def test_a_prompt_alone_over_the_context_is_refused_by_prefill_too(bench: Bench):
    limit = bench.engine.limits.max_context_tokens
    with pytest.raises(ContextTooLong) as refused:
        await bench.engine.prefill(bench.prefill_request(prompt_of(limit + 1)))
    assert refused.value.metadata == {"name": "max_context_tokens", "limit": str(limit)}
    with pytest.raises(InvalidRequest):
        await bench.engine.prefill(bench.prefill_request([bench.engine.limits.vocab_size]))
    with pytest.raises(InvalidRequest):
        await bench.engine.prefill(bench.prefill_request([]))


async def test_nonsense_is_refused(bench: Bench):
    for request in (
        bench.request([]),
        bench.request([-1]),
        bench.request([1, 2], max_new_tokens=0),
        bench.request([1, 2], samples=0),
        bench.request([1, 2], stop_token_ids=(bench.engine.limits.vocab_size,)),
        bench.request([1, 2], stop_token_ids=(-1,)),
        replace(bench.request([1, 2], samples=2), sample_ids=("x", "x")),
        replace(bench.request([1, 2], samples=2), sample_indexes=(1,)),
        replace(bench.request([1, 2], samples=2), sample_indexes=(1, 1)),
        replace(bench.request([1, 2], samples=2), sample_indexes=(1, -1)),
    ):
        with pytest.raises(InvalidRequest):
            await bench.run(request)


async def test_a_full_queue_refuses_the_next_request_and_recovers(small: Bench):
    limits = small.engine.limits
    running = asyncio.create_task(small.ask(prompt_of(5), limits.max_running_samples, max_new_tokens=100))
    await until(lambda: small.engine.load().running_samples == limits.max_running_samples, "all rows taken")
    count = limits.max_waiting_requests
    with small.between_steps():
        waiting = [asyncio.create_task(small.ask(prompt_of(5), max_new_tokens=3)) for _ in range(count)]
        await until(lambda: small.engine.load().waiting_requests == count, "requests that wait")
        with pytest.raises(EngineFull) as refused:
            await small.ask(prompt_of(5))
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.metadata == {"name": "max_waiting_requests", "limit": str(count)}
    await asyncio.gather(running, *waiting)
    await small.ask(prompt_of(5))


async def test_the_id_of_a_running_request_cannot_be_taken(bench: Bench):
    request = bench.request(prompt_of(5), max_new_tokens=100)
    running = asyncio.create_task(bench.run(request))
    await until(lambda: bench.engine.load().running_samples, "a running sample")
    with bench.between_steps(), pytest.raises(RequestIdReused):
        await bench.run(request)
    (sample,) = await running
    assert len(sample.token_ids) == 100


async def test_what_an_engine_cannot_do_it_refuses_by_the_capabilitys_name(bench: Bench):
    """What it can do is what the other bodies use."""
    can = bench.engine.capabilities
    for name, request in (
        ("truncates_sampling", bench.request(prompt_of(5), top_k=3)),
        ("truncates_sampling", bench.request(prompt_of(5), top_p=0.5)),
        ("captures_routes", bench.request(prompt_of(5), capture_routes=True)),
    ):
        if getattr(can, name):
            bench.engine.check(request)
            continue
        with pytest.raises(Unsupported) as refused:
            await bench.run(request)
        assert refused.value.metadata["capability"] == name
    header = KvHeader("float32", (), 4, "salt", 0, bench.version, bench.version)
    for transport in {FRAMES, "nixl", "mooncake"} - set(can.kv_transports):
        kv = KvReference(transport, b"{}", "t", 4, "salt", 0, bench.version, bench.version)
        request = replace(bench.request(prompt_of(5)), kv=KvPayload(header, b"") if transport == FRAMES else kv)
        with pytest.raises(Unsupported, match=transport) as refused:
            await bench.run(request)
        assert refused.value.metadata["capability"] == "kv_transports"
    if not can.kv_events:
        assert bench.engine.drain_kv_events() == []
