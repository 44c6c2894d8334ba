"""A prompt computed at one worker and sampled at another."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
from slipstream.api.rollout.v1 import rows_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import SamplingBiased, rpc_errors
from slipstream.common.version import PolicyVersion

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


async def test_greedy_through_both_services_equals_the_plain_loop(cluster):
    prefiller, decoder = cluster.members
    for number, prompt in enumerate([PROMPT, PROMPT[:4], PROMPT[:5], [7], [*PROMPT, 2, 2]]):
        request_id = f"g{number}.0"
        prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, request_id, prompt=prompt))
        assert prefilled.kv.token_count == len(prompt) - 1
        kv = prefilled.kv if prefilled.HasField("kv") else None
        request = cluster.decode_request(
            decoder, kv, request_id, 2, prompt=prompt, sampling={"temperature": 0.0, "max_new_tokens": 12}
        )
        expected = cluster.greedy(V1, prompt, 12)
        logprobs = cluster.logprobs(V1, prompt + expected)
        for sample in await cluster.samples(decoder, request):
            assert list(sample.token_ids) == expected
            assert sample.cached_token_count == len(prompt) - 1  # what was sent counts as cached
            for position, (token, logprob) in enumerate(zip(expected, sample.logprobs, strict=True), len(prompt) - 1):
                assert abs(float(logprobs[position, token]) - logprob) < 1e-4
            assert sample.finish_reason == types_pb2.FINISH_REASON_LENGTH
            assert [span.token_count for span in sample.spans] == [12]
            assert PolicyVersion.from_proto(sample.spans[0].kv_oldest_version) == V1
    await prefiller.freed()
    await decoder.freed()


async def test_a_group_of_short_samples_is_one_message_and_shares_the_prompt(cluster):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    flush = {"max_ms": 60_000}  # which eight tokens do not take
    request = cluster.decode_request(decoder, prefilled.kv, samples=8, sampling={"temperature": 1.0}, flush=flush)
    messages = [message async for message in decoder.decode.Decode(request)]
    assert len(messages) == 1
    assert len({tuple(chunk.token_ids) for chunk in messages[0].chunks}) > 1
    again = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, "g2.0"))
    assert again.cached_token_count == 8


async def test_a_training_rollout_with_truncation_is_refused_before_its_kv_is_pulled(cluster):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    request = cluster.decode_request(decoder, prefilled.kv, sampling={"temperature": 1.0, "top_p": 0.9})
    request.for_training = True
    with pytest.raises(SamplingBiased) as refused, rpc_errors():
        await cluster.samples(decoder, request)
    assert refused.value.metadata == {"field": "top_p"}
    request.for_training = False
    assert len(await cluster.samples(decoder, request)) == 1


async def test_a_repeated_prefill_answers_the_same_handle(cluster):
    prefiller = cluster.members[0]
    first, second = [await prefiller.prefill.Prefill(cluster.prefill_request(prefiller)) for _ in range(2)]
    assert first.kv.transfer_id == second.kv.transfer_id
    release = prefill_pb2.ReleaseKvRequest(request_id="r", transfer_ids=[first.kv.transfer_id, "unknown"])
    assert (await prefiller.transfers.ReleaseKv(release)).released_count == 1
    await prefiller.freed()


async def test_routes_are_fetched_by_reference_in_one_stream(cluster):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    request = cluster.decode_request(decoder, prefilled.kv, samples=2, sampling={"temperature": 1.0})
    samples = await cluster.samples(decoder, request)
    assert prefilled.routes.key == "p/g.0"
    assert samples[1].routes.key == "d/g.0.1"
    assert [(r.start, r.end) for r in prefilled.routes.ranges] == [(0, len(PROMPT) - 1)]
    # Rows of decode begin with the last prompt token; the last sampled one has none.
    assert [(r.start, r.end) for r in samples[0].routes.ranges] == [(len(PROMPT) - 1, len(PROMPT) + 7)]

    async def fetch(refs, offset: int = 0):
        call = decoder.rows.FetchRows(rows_pb2.FetchRowsRequest(refs=refs, offset_bytes=offset))
        messages = [message async for message in call]
        return messages[0].header, b"".join(message.data for message in messages[1:])

    gone = types_pb2.RowsRef(holder="x", key="d/gone", dtype="uint8")
    earlier_life = types_pb2.RowsRef(holder="x", holder_epoch="earlier", key="d/g.0.0", dtype="uint8")
    refs = [samples[0].routes, gone, samples[1].routes, earlier_life]
    header, data = await fetch(refs)
    assert [part.missing for part in header.parts] == [False, True, False, True]
    assert header.size_bytes == len(data) == sum(ref.size_bytes for ref in (refs[0], refs[2]))
    assert (await fetch(refs, 5))[1] == data[5:]
    rows = np.frombuffer(data[: refs[0].size_bytes], np.uint8).reshape(-1, 2, 2)
    assert rows.max() < 4
    assert (rows[..., 0] != rows[..., 1]).all()
    part = types_pb2.RowsRef()
    part.CopyFrom(refs[0])
    part.ranges[0].start += 2
    header, data_of_part = await fetch([part])
    assert header.parts[0].first_position == len(PROMPT) + 1
    assert data_of_part == rows[2:].tobytes()
    released = await decoder.rows.ReleaseRows(rows_pb2.ReleaseRowsRequest(request_id="r", keys=[refs[0].key, "d/gone"]))
    assert released.released_count == 1
    assert (await fetch(refs))[0].parts[0].missing


async def test_a_prompt_that_decode_computes_has_its_routes_there_and_is_told_of_once(cluster):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))

    async def ask(request_id: str, kv: prefill_pb2.KvHandle | None, **fields):
        request = cluster.decode_request(decoder, kv, request_id, samples=2, flush={"max_ms": 1}, **fields)
        messages = [message async for message in decoder.decode.Decode(request)]
        told = [message.prompt_routes for message in messages if message.HasField("prompt_routes")]
        tokens = [token for m in messages for c in m.chunks if c.sample_index == 0 for token in c.token_ids]
        cached = max(chunk.cached_token_count for message in messages for chunk in message.chunks)
        return tokens, told, cached

    greedy = {"sampling": {"temperature": 0.0, "max_new_tokens": 40}}
    tokens, (routes,), cached = await ask("g1.0", None, **greedy)
    assert tokens == cluster.greedy(V1, PROMPT, 40)
    assert (routes.key, routes.holder, cached) == ("d/g1.0", decoder.worker.identity.address, 0)
    assert [(part.start, part.end) for part in routes.ranges] == [(0, len(PROMPT) - 1)]
    header, data = await rows_of(decoder, routes)
    assert (header.parts[0].missing, len(data)) == (False, routes.size_bytes)
    assert data == (await rows_of(prefiller, prefilled.routes))[1]
    assert (await ask("g2.0", None, **greedy))[2] == 8  # its own prefix, found again
    assert (await ask("g3.0", prefilled.kv, **greedy))[1] == []
    assert (await ask("g4.0", None, prompt=[7]))[1] == []  # one token: nothing before the last
    assert (await ask("g5.0", None, capture_routes=False, **greedy))[1] == []
    await decoder.freed()


async def rows_of(member, ref: types_pb2.RowsRef) -> tuple[rows_pb2.RowsHeader, bytes]:
    call = member.rows.FetchRows(rows_pb2.FetchRowsRequest(refs=[ref]))
    messages = [message async for message in call]
    return messages[0].header, b"".join(message.data for message in messages[1:])


async def test_a_request_for_another_epoch_or_a_newer_version_is_sent_back(cluster, refusal):
    prefiller, decoder = cluster.members
    for fields in ({"worker_epoch": "earlier"}, {"min_policy_version": V2.to_proto()}):
        assert await refusal(prefiller.prefill.Prefill(cluster.prefill_request(prefiller, **fields))) == "WORKER_STALE"
        assert await refusal(decoder.decode.Decode(cluster.decode_request(decoder, None, **fields))) == "WORKER_STALE"
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, min_policy_version=V1.to_proto()))
    prefilled.kv.worker_epoch = "earlier"
    fetch = prefill_pb2.FetchKvRequest(kv=prefilled.kv)
    assert await refusal(prefiller.transfers.FetchKv(fetch)) == "WORKER_STALE"


async def test_what_does_not_fit_is_refused(cluster, refusal):
    prefiller, decoder = cluster.members
    long = cluster.prefill_request(prefiller, prompt=[1] * 513)
    assert await refusal(prefiller.prefill.Prefill(long)) == "CONTEXT_TOO_LONG"
    based = cluster.prefill_request(prefiller)
    based.prompt.base_token_count = 4
    assert await refusal(prefiller.prefill.Prefill(based)) == "PREFIX_UNKNOWN"
    request = cluster.decode_request(decoder, None, sampling={"max_new_tokens": 502})
    assert await refusal(decoder.decode.Decode(request)) == "CONTEXT_TOO_LONG"


LONG = {"max_new_tokens": 480, "temperature": 1.0}


async def test_an_abort_ends_the_stream_and_returns_when_the_blocks_are_free(cluster):
    _, decoder = cluster.members
    call = decoder.decode.Decode(cluster.decode_request(decoder, None, samples=4, sampling=LONG, flush={"max_ms": 1}))
    stream = aiter(call)
    assert (await anext(stream)).chunks
    abort = decode_pb2.DecodeServiceAbortRequest(request_id="g.0")
    assert (await decoder.decode.Abort(abort)).found
    assert decoder.worker.engine.load().blocks_used == 0
    rest = [chunk async for message in stream for chunk in message.chunks]
    assert [chunk.finish_reason for chunk in rest[-4:]] == [types_pb2.FINISH_REASON_ABORTED] * 4
    assert not (await decoder.decode.Abort(abort)).found


@pytest.mark.parametrize("way", ["disconnect", "deadline"])
async def test_a_caller_that_leaves_frees_its_blocks(cluster, way):
    _, decoder = cluster.members
    request = cluster.decode_request(decoder, None, samples=4, sampling=LONG, flush={"max_ms": 1})
    call = decoder.decode.Decode(request, timeout=5.0 if way == "deadline" else 60.0)
    await call.read()
    with decoder.engine.between_steps():
        assert decoder.worker.engine.load().blocks_used
        if way == "disconnect":
            call.cancel()
        await decoder.freed()
    assert decoder.worker.gate.active == 0


async def test_an_aborted_prefill_frees_what_it_holds(cluster, refusal):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    abort = prefill_pb2.PrefillServiceAbortRequest(request_id="g.0")
    assert (await prefiller.prefill.Abort(abort)).found
    await prefiller.freed()
    assert not (await prefiller.prefill.Abort(abort)).found
    request = cluster.decode_request(decoder, prefilled.kv)
    assert await refusal(decoder.decode.Decode(request)) == "KV_TRANSFER_FAILED"


async def test_a_cleanup_meant_for_an_earlier_life_touches_nothing_of_this_one(cluster, refusal):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    call = decoder.decode.Decode(cluster.decode_request(decoder, None, sampling=LONG, flush={"max_ms": 1}))
    stream = aiter(call)
    await anext(stream)
    key = prefilled.routes.key

    earlier = {"worker_epoch": "earlier"}
    cleanups = [
        prefiller.prefill.Abort(prefill_pb2.PrefillServiceAbortRequest(request_id="g.0", **earlier)),
        prefiller.transfers.ReleaseKv(prefill_pb2.ReleaseKvRequest(request_id="r", transfer_ids=["g.0"], **earlier)),
        decoder.decode.Abort(decode_pb2.DecodeServiceAbortRequest(request_id="g.0", **earlier)),
    ]

    def released_rows(epoch: str):
        return prefiller.rows.ReleaseRows(rows_pb2.ReleaseRowsRequest(request_id="r", keys=[key], holder_epoch=epoch))

    for cleanup in cleanups:
        assert await refusal(cleanup) == "WORKER_STALE"
    assert (await released_rows("earlier")).released_count == 0
    assert prefiller.engine.load().kv_transfers == 1
    assert not (await rows_of(prefiller, prefilled.routes))[0].parts[0].missing
    assert not (await anext(stream)).chunks[0].finish_reason
    own = prefill_pb2.PrefillServiceAbortRequest(request_id="g.0", worker_epoch=prefiller.epoch)
    assert (await prefiller.prefill.Abort(own)).found
    own = decode_pb2.DecodeServiceAbortRequest(request_id="g.0", worker_epoch=decoder.epoch)
    assert (await decoder.decode.Abort(own)).found
    assert (await released_rows(prefiller.epoch)).released_count == 1


async def test_unfetched_kv_is_freed_at_its_expiry(empty_cluster):
    from slipstream.engine.embedded.config import EmbeddedConfig

    await empty_cluster.publish(V1)
    prefiller = await empty_cluster.add_worker(
        "prefill", engine=EmbeddedConfig(block_size_tokens=4, transfer_ttl_s=2.0)
    )
    await prefiller.serving(V1)
    await prefiller.prefill.Prefill(empty_cluster.prefill_request(prefiller))
    assert prefiller.worker.engine.load().blocks_used
    await prefiller.freed()


async def test_a_dead_prefill_worker_ends_the_request_in_time(cluster, refusal):
    prefiller, decoder = cluster.members
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    await prefiller.server.stop(None)
    request = cluster.decode_request(decoder, prefilled.kv)
    async with asyncio.timeout(30):
        assert await refusal(decoder.decode.Decode(request)) == "KV_TRANSFER_FAILED"
    assert decoder.worker.gate.active == 0


async def test_a_drained_worker_refuses_new_requests_and_finishes_open_ones(cluster, refusal):
    from slipstream.api.inference.v1 import worker_pb2

    _, decoder = cluster.members
    stream = aiter(decoder.decode.Decode(cluster.decode_request(decoder, None, sampling=LONG, flush={"max_ms": 1})))
    await anext(stream)
    drained = decoder.control.Drain(worker_pb2.DrainRequest(request_id="d"), timeout=20)
    async with asyncio.timeout(30):
        while not decoder.worker.gate.draining:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.005)
    request = cluster.decode_request(decoder, None, "late.0")
    assert await refusal(decoder.decode.Decode(request)) == "DRAINING"
    assert (await decoder.describe()).state == worker_pb2.WORKER_STATE_DRAINING
    assert [message async for message in stream]
    assert (await drained).remaining_request_count == 0
