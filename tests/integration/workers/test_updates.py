"""Weights that change under a running worker."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import numpy as np
import pytest

from slipstream.api.inference.v1 import prefill_pb2, worker_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import from_rpc_error
from slipstream.common.state import SERVING
from slipstream.common.version import PolicyVersion
from slipstream.weights.manifest import Probe
from tests.integration.workers.conftest import LEASE_MS, WAIT_S

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
SERVING_STATE, STALE_STATE = worker_pb2.WORKER_STATE_SERVING, worker_pb2.WORKER_STATE_STALE
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
LONG = {"max_new_tokens": 400, "temperature": 1.0}


def begin(version: PolicyVersion, update_id: str = "u", holder: str = "keeper") -> worker_pb2.BeginUpdateRequest:
    return worker_pb2.BeginUpdateRequest(
        update_id=update_id, holder=holder, version=version.to_proto(), lease_ttl_ms=LEASE_MS
    )


def corrupt(cluster, version: PolicyVersion) -> bytes:
    """Flip one bit of the version on disk; returns what was there."""
    path = cluster.run_dir / "versions" / str(version) / "rank-00000.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    return good


async def test_weights_are_swapped_between_two_steps_of_running_requests(cluster):
    _, decoder = cluster.members
    await cluster.publish(V2)
    stream = aiter(decoder.decode.Decode(cluster.decode_request(decoder, None, samples=3, sampling=LONG)))
    async with asyncio.timeout(WAIT_S):
        while decoder.worker.engine.load().decoded_tokens < 3 * 3:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.002)
    with decoder.engine.between_steps():
        applied = await decoder.update(V2)
    assert applied.in_flight_sample_count == 3
    assert applied.verified_slice_count > 10
    assert applied.probe_max_abs_error < 1e-3
    samples = [[], [], []]
    async for message in stream:
        for chunk in message.chunks:
            samples[chunk.sample_index].append(chunk)
    for chunks in samples:
        spans = [span for chunk in chunks for span in chunk.spans if span.token_count]
        versions = [PolicyVersion.from_proto(span.version) for span in spans]
        assert versions == sorted(versions)
        assert set(versions) == {V1, V2}
        assert {PolicyVersion.from_proto(span.kv_oldest_version) for span in spans} == {V1}
        assert sum(span.token_count for span in spans) == 400
        assert chunks[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    fresh = cluster.decode_request(decoder, None, "g1.0", salt="run/1.2", sampling={"temperature": 0.0})
    (sample,) = await cluster.samples(decoder, fresh)
    assert list(sample.token_ids) == cluster.greedy(V2, PROMPT, 8)
    timeline = [json.loads(line) for line in (cluster.run_dir / "timeline" / "decode-1.jsonl").read_text().splitlines()]
    assert ("update", "1.2", 3) in [(i["kind"], i.get("version"), i.get("in_flight_samples")) for i in timeline]


async def test_what_no_group_runs_at_any_more_is_freed_when_its_last_group_ends(cluster, refusal):
    prefiller, _ = cluster.members
    engine = prefiller.worker.engine

    async def prefill(request_id: str, version: PolicyVersion) -> prefill_pb2.PrefillResponse:
        request = cluster.prefill_request(
            prefiller, request_id, salt=f"run/{version}", min_policy_version=version.to_proto()
        )
        return await prefiller.prefill.Prefill(request)

    async def cached(request_id: str, version: PolicyVersion) -> int:
        prefilled = await prefill(request_id, version)
        await prefiller.prefill.Abort(prefill_pb2.PrefillServiceAbortRequest(request_id=request_id))
        return prefilled.cached_token_count

    assert [await cached("g1", V1), await cached("g2", V1)] == [0, 8]
    await cluster.publish(V2)
    await prefiller.update(V2)
    assert await cached("new", V2) == 0
    assert await prefiller.end_salts(V2, running=[V1]) == 0
    assert await cached("late", V1) == 8
    held = await prefill("held", V1)  # nobody comes for it
    assert await prefiller.end_salts(V2) == 1  # between two updates
    assert await refusal(prefiller.transfers.FetchKv(prefill_pb2.FetchKvRequest(kv=held.kv))) == "KV_UNKNOWN"
    await prefiller.freed()
    assert engine.load().dead_kv_bytes == 0
    assert await cached("too-late", V1) == 0
    assert await cached("g3", V2) == 8
    earlier = worker_pb2.EndSaltsRequest(worker_epoch="earlier", dispatch_version=V2.to_proto())
    assert await refusal(prefiller.control.EndSalts(earlier)) == "WORKER_STALE"


async def test_a_second_updater_is_told_who_holds_the_update(cluster, refusal):
    _, decoder = cluster.members
    await cluster.publish(V2)
    await decoder.control.BeginUpdate(begin(V2))
    assert await refusal(decoder.control.BeginUpdate(begin(V2, "other", "operator"))) == "UPDATE_IN_PROGRESS"
    await decoder.control.AbortUpdate(worker_pb2.AbortUpdateRequest(update_id="u"))
    assert await refusal(decoder.control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id="u"))) == "UPDATE_NOT_OPEN"
    stale_epoch = begin(V2)
    stale_epoch.worker_epoch = "earlier"
    assert await refusal(decoder.control.BeginUpdate(stale_epoch)) == "WORKER_STALE"


async def test_a_corrupt_byte_is_caught_before_the_swap_and_a_good_refit_heals(cluster, refusal):
    prefiller, decoder = cluster.members
    for member in cluster.members:
        async with asyncio.timeout(WAIT_S):
            while member.worker.updates._open is not None:  # noqa: ASYNC110 its refit closes
                await asyncio.sleep(0.005)
        member.tasks[1].cancel()  # no prefetch of the good bytes
    await cluster.publish(V2)
    good = corrupt(cluster, V2)
    stream = aiter(decoder.decode.Decode(cluster.decode_request(decoder, None, sampling={**LONG, "temperature": 0.0})))
    assert await refusal(decoder.control.BeginUpdate(begin(V2))) == "WEIGHTS_CORRUPT"
    described = await decoder.describe()
    assert (described.state, PolicyVersion.from_proto(described.version)) == (STALE_STATE, V1)
    assert "CRC" in described.stale_reason
    refused = decoder.decode.Decode(cluster.decode_request(decoder, None, "late.0"))
    assert await refusal(refused) == "WORKER_STALE"
    # What was running goes on, on the old weights.
    tokens = [token async for message in stream for chunk in message.chunks for token in chunk.token_ids]
    assert tokens[:16] == cluster.greedy(V1, PROMPT, 16)
    (cluster.run_dir / "versions" / "1.2" / "rank-00000.safetensors").write_bytes(good)
    await decoder.update(V2, "again")
    described = await decoder.describe()
    assert (described.state, PolicyVersion.from_proto(described.version)) == (SERVING_STATE, V2)
    assert (await prefiller.describe()).state == SERVING_STATE


async def test_a_wrong_probe_puts_the_old_weights_back(cluster, refusal):
    _, decoder = cluster.members
    await cluster.publish(V2, probe_error=0.5)
    await decoder.control.BeginUpdate(begin(V2))
    assert await refusal(decoder.control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id="u"))) == "PROBE_FAILED"
    described = await decoder.describe()
    assert (described.state, PolicyVersion.from_proto(described.version)) == (STALE_STATE, V1)
    await cluster.publish(V3)
    await decoder.update(V3, "next")
    assert (await decoder.describe()).state == SERVING_STATE


def hostile(fault: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights that are sealed in good order and are none of this model's."""
    name = min(tensors)
    if fault == "not finite":
        return {**tensors, name: np.full_like(tensors[name], np.nan)}
    if fault == "another shape":
        return {**tensors, name: np.zeros((3, 3), np.float32)}
    if fault == "an unknown tensor":
        return {**tensors, "edges": np.zeros(3, np.float32)}
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize("fault", ["not finite", "another shape", "an unknown tensor", "a missing tensor"])
async def test_weights_that_are_none_of_the_models_never_serve_and_the_next_version_heals(cluster, refusal, fault):
    from slipstream.models.checkpoint import to_hf

    _, decoder = cluster.members
    tensors = {name: tensor.numpy() for name, tensor in to_hf(cluster.model(V2)).items()}
    await cluster.transport.publish(V2, hostile(fault, tensors), Probe((1,), (), 1.0))  # and no probe to tell
    try:
        await decoder.control.BeginUpdate(begin(V2))
        reason = await refusal(decoder.control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id="u")))
    except grpc.aio.AioRpcError as error:
        reason = from_rpc_error(error).reason
    assert reason == "WEIGHTS_CORRUPT"
    described = await decoder.describe()
    assert (described.state, PolicyVersion.from_proto(described.version)) == (STALE_STATE, V1)
    await cluster.publish(V3)
    await decoder.update(V3, "next")
    assert (await decoder.describe()).state == SERVING_STATE


async def test_an_unsealed_version_cannot_be_begun(cluster, refusal):
    _, decoder = cluster.members
    await cluster.transport.open_version(V2)
    assert await refusal(decoder.control.BeginUpdate(begin(V2))) == "WEIGHT_VERSION_UNKNOWN"
    assert await refusal(decoder.control.BeginUpdate(begin(V1))) == "VERSION_NOT_NEWER"


async def test_a_worker_that_starts_corrupt_becomes_routable_with_the_next_version(empty_cluster):
    await empty_cluster.publish(V1)
    corrupt(empty_cluster, V1)
    decoder = await empty_cluster.add_worker("decode")
    async with asyncio.timeout(30):
        while (await decoder.describe()).state != STALE_STATE:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.01)
    await empty_cluster.publish(V2)
    await decoder.serving(V2)
    assert (await decoder.describe()).state == SERVING_STATE


async def test_a_restarted_worker_refits_to_what_is_served_and_refuses_its_earlier_life(cluster, refusal):
    """The salt invariant across a restart between Place and Prefill."""
    prefiller, _ = cluster.members
    await cluster.publish(V2)
    cluster.state.versions[SERVING] = V2
    placed = cluster.prefill_request(prefiller, min_policy_version=V2.to_proto(), salt="run/1.2/float32")
    cluster.members.remove(prefiller)
    await prefiller.stop()
    await cluster.publish(V3)
    restarted = await cluster.add_worker("prefill")
    await restarted.serving(V2)
    assert await refusal(restarted.prefill.Prefill(placed)) == "WORKER_STALE"
    placed.worker_epoch = restarted.epoch
    prefilled = await restarted.prefill.Prefill(placed)
    assert PolicyVersion.from_proto(prefilled.kv_oldest_version) == V2


async def test_no_group_reads_kv_older_than_its_dispatch_version(cluster):
    """The salt invariant across two updates, with late members of each group."""
    prefiller, decoder = cluster.members

    async def turn(group: str, version: PolicyVersion) -> PolicyVersion:
        salt = {"salt": f"run/{version}/float32", "min_policy_version": version.to_proto()}
        prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, group, **salt))
        (sample,) = await cluster.samples(decoder, cluster.decode_request(decoder, prefilled.kv, group, **salt))
        oldest = [PolicyVersion.from_proto(span.kv_oldest_version) for span in sample.spans]
        return min(*oldest, PolicyVersion.from_proto(prefilled.kv_oldest_version))

    seen = {V1: [await turn("a.0", V1)]}
    for number, version in enumerate((V2, V3)):
        await cluster.publish(version)
        for member in (decoder, prefiller):
            await member.update(version, f"to {version}")
        seen[version] = [await turn(f"b{number}.0", version)]
        for early in seen:  # late members of every group so far, with the group's own salt
            seen[early].append(await turn(f"late{number}.{early.step}", early))
    for dispatched, oldest in seen.items():
        assert min(oldest) >= dispatched
    assert min(seen[V1]) == V1  # its prefix survived both updates
    assert min(seen[V3]) == V3


async def test_load_reports_carry_version_counters_and_cache_events(cluster):
    prefiller, _ = cluster.members
    stream = aiter(prefiller.control.WatchLoad(worker_pb2.WatchLoadRequest()))
    first = await anext(stream)
    assert first.kv_events_reset
    assert (first.sequence, first.epoch, first.state) == (1, prefiller.epoch, SERVING_STATE)
    await prefiller.prefill.Prefill(cluster.prefill_request(prefiller))
    events, reports = b"", []
    async with asyncio.timeout(30):
        while len(events) < 2 * 9:
            reports.append(await anext(stream))
            events += reports[-1].kv_events
    from slipstream.engine.hashing import block_hashes

    hashes = block_hashes("run/1.1/float32", PROMPT[:-1], 4)
    assert events == b"".join(b"\x01" + value.to_bytes(8, "little") for value in hashes)
    assert not any(report.kv_events_reset for report in reports)
    assert reports[-1].load.prefilled_token_count == len(PROMPT) - 1
    await cluster.publish(V2)
    await prefiller.update(V2)
    async with asyncio.timeout(30):
        while PolicyVersion.from_proto((await anext(stream)).version) != V2:
            pass


async def test_the_reported_counters_are_the_callers_own_count(cluster):
    _, decoder = cluster.members
    stream = aiter(decoder.control.WatchLoad(worker_pb2.WatchLoadRequest()))
    running = asyncio.create_task(
        cluster.samples(decoder, cluster.decode_request(decoder, None, samples=8, sampling=LONG))
    )
    async with asyncio.timeout(2 * WAIT_S):
        while decoder.engine.load().running_samples < 8:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.002)
        with decoder.engine.between_steps():
            load = (await anext(stream)).load
            while load.running_sample_count < 8:
                load = (await anext(stream)).load
        in_flight = load.tokens_in_flight_count
        assert 8 * len(PROMPT) <= in_flight <= 8 * (len(PROMPT) + LONG["max_new_tokens"])
        samples = await running
        sampled = sum(len(sample.token_ids) for sample in samples)
        report = await anext(stream)
        while report.load.running_sample_count:
            report = await anext(stream)
    load = report.load
    assert report.epoch == decoder.epoch
    assert (load.sampled_token_count, load.prefilled_token_count) == (sampled, len(PROMPT) - 1)
    assert (load.blocks_used, load.waiting_request_count, load.tokens_in_flight_count) == (0, 0, 0)


@pytest.mark.parametrize("per_second", [2, 10])
async def test_load_reports_keep_to_their_rate(cluster, per_second):
    _, decoder = cluster.members
    began_s = time.monotonic()
    stream = aiter(decoder.control.WatchLoad(worker_pb2.WatchLoadRequest(max_per_second=per_second)))
    running = aiter(decoder.decode.Decode(cluster.decode_request(decoder, None, samples=8, sampling=LONG)))
    async with asyncio.timeout(WAIT_S):
        for _ in range(1 + per_second):
            await anext(stream)
    assert time.monotonic() - began_s > 0.95
    await running.aclose()
