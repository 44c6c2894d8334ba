"""Update epochs under faults: callers that die, workers that die, versions that are wrong, and requests in flight."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.errors import UpdateInProgress, WeightsCorrupt, rpc_errors
from slipstream.common.version import PolicyVersion
from slipstream.weights.manifest import Probe, describe_tensors
from tests.integration.workers.conftest import LEASE_MS, WAIT_S, both_pools, clustering, routing
from tests.integration.workers.swap_oracle import logprobs_over_swaps
from tests.integration.workers.turns import refused

ENGINES = ("embedded", "vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
SERVING, STALE, STARTING = (
    worker_pb2.WORKER_STATE_SERVING,
    worker_pb2.WORKER_STATE_STALE,
    worker_pb2.WORKER_STATE_STARTING,
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(make_config, tmp_path, lending):
    async with clustering(make_config, tmp_path, lending()) as cluster:
        yield await both_pools(cluster)


@pytest_asyncio.fixture(loop_scope="module")
async def start_turns(cluster, valkey_url):
    async with routing(cluster, valkey_url) as start:
        yield start


def begin(version: PolicyVersion, update_id: str = "u", holder: str = "keeper"):
    return worker_pb2.BeginUpdateRequest(
        update_id=update_id, holder=holder, version=version.to_proto(), lease_ttl_ms=LEASE_MS
    )


def apply(update_id: str = "u") -> worker_pb2.ApplyUpdateRequest:
    return worker_pb2.ApplyUpdateRequest(update_id=update_id)


def finish(update_id: str = "u") -> worker_pb2.FinishUpdateRequest:
    return worker_pb2.FinishUpdateRequest(update_id=update_id)


async def state_of(member) -> tuple[int, PolicyVersion]:
    described = await member.describe()
    return described.state, PolicyVersion.from_proto(described.version)


class Stream:
    """A request in flight whose tokens come as they are sampled."""

    def __init__(self, cluster, member, samples: int = 1, count: int = 400, **sampling) -> None:
        self.samples = [([], [], []) for _ in range(samples)]
        """Tokens, log-probabilities and versions of each sample."""
        wanted = {"max_new_tokens": count, "temperature": 0.0, **sampling}
        request = cluster.decode_request(member, None, "stream", samples, sampling=wanted, flush={"max_ms": 1})
        self._reading = asyncio.create_task(self._read(member.decode.Decode(request)))

    async def _read(self, call) -> None:
        async for message in call:
            for chunk in message.chunks:
                tokens, logprobs, versions = self.samples[chunk.sample_index]
                tokens += chunk.token_ids
                logprobs += chunk.logprobs
                for span in chunk.spans:
                    versions += [PolicyVersion.from_proto(span.version)] * span.token_count

    async def flowing(self) -> None:
        before = [len(tokens) for tokens, _, _ in self.samples]
        async with asyncio.timeout(WAIT_S):
            while any(len(tokens) == count for (tokens, _, _), count in zip(self.samples, before, strict=True)):  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.001)

    async def ended(self):
        async with asyncio.timeout(60):
            await self._reading
        return self.samples


def assert_untouched(cluster, tokens: list[int], versions: list[PolicyVersion]) -> None:
    """All of a greedy request's tokens are those of the first weights."""
    assert (len(tokens), set(versions)) == (400, {V1})
    logprobs = cluster.logprobs(V1, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    assert (logprobs.amax(-1) - chosen).max() < 1e-4


# --- Callers that die --------------------------------------------------------------------------------


async def test_a_caller_that_dies_before_the_swap_leaves_the_old_weights_going_on(cluster, refusal):
    decoder = cluster.members[1]
    stream = Stream(cluster, decoder)
    await stream.flowing()
    await cluster.publish(V2)
    await decoder.control.BeginUpdate(begin(V2))
    assert await refusal(decoder.control.BeginUpdate(begin(V2, "v", "other"))) == "UPDATE_IN_PROGRESS"
    await decoder.lease_ends()
    assert await refusal(decoder.control.ApplyUpdate(apply())) == "UPDATE_NOT_OPEN"
    assert await state_of(decoder) == (SERVING, V1)
    ((tokens, _, versions),) = await stream.ended()
    assert_untouched(cluster, tokens, versions)
    assert decoder.engine.updates == 1  # the first weights
    await decoder.control.BeginUpdate(begin(V2, "v", "other"))
    await decoder.control.ApplyUpdate(apply("v"))
    assert await state_of(decoder) == (SERVING, V2)


async def test_a_caller_that_dies_during_the_swap_does_not_stop_it(cluster, refusal):
    decoder = cluster.members[1]
    await cluster.publish(V2)
    await decoder.control.BeginUpdate(begin(V2))
    point = decoder.engine.points["update"]
    point.close()
    dying = decoder.control.ApplyUpdate(apply())
    held = asyncio.create_task(point.reached())
    await held
    dying.cancel()
    await decoder.lease_ends()
    # Nobody else may swap while one goes on, however old its lease is.
    assert await refusal(decoder.control.BeginUpdate(begin(V2, "v", "other"))) == "UPDATE_IN_PROGRESS"
    point.open()
    await decoder.serving(V2)
    assert await state_of(decoder) == (SERVING, V2)
    fresh = cluster.decode_request(decoder, None, salt="run/1.2", sampling={"temperature": 0.0})
    (sample,) = await cluster.samples(decoder, fresh)
    assert list(sample.token_ids) == cluster.greedy(V2, PROMPT, 8)


async def test_a_swap_that_fails_after_its_caller_died_is_rolled_back_and_the_worker_is_stale(cluster, refusal):
    decoder = cluster.members[1]
    stream = Stream(cluster, decoder)
    await stream.flowing()
    await cluster.publish(V2, probe_error=0.5)
    await decoder.control.BeginUpdate(begin(V2))
    point = decoder.engine.points["update"]
    point.close()
    dying = decoder.control.ApplyUpdate(apply())
    await asyncio.create_task(point.reached())
    dying.cancel()
    point.open()
    async with asyncio.timeout(WAIT_S):
        while (await state_of(decoder)) != (STALE, V1):  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.005)
    assert await refusal(decoder.decode.Decode(cluster.decode_request(decoder, None, "late"))) == "WORKER_STALE"
    ((tokens, _, versions),) = await stream.ended()  # the old copy is kept: what was in flight goes on with it
    assert_untouched(cluster, tokens, versions)
    await cluster.publish(V3)
    await decoder.update(V3, "next")
    assert await state_of(decoder) == (SERVING, V3)


async def test_a_caller_that_dies_after_the_swap_is_not_needed_to_finish_it(cluster, refusal):
    decoder = cluster.members[1]
    for version in (V2, V3):
        await cluster.publish(version)
    await decoder.control.BeginUpdate(begin(V2))
    await decoder.control.ApplyUpdate(apply())
    assert await state_of(decoder) == (SERVING, V2)
    assert await refusal(decoder.control.BeginUpdate(begin(V3, "v", "other"))) == "UPDATE_IN_PROGRESS"
    await decoder.lease_ends()
    await decoder.control.BeginUpdate(begin(V3, "v", "other"))
    await decoder.control.ApplyUpdate(apply("v"))
    await decoder.control.FinishUpdate(finish("v"))
    assert await state_of(decoder) == (SERVING, V3)


# --- Callers that come twice -------------------------------------------------------------------------


async def test_of_two_callers_at_once_one_gets_the_update_and_the_other_its_name(cluster):
    decoder = cluster.members[1]
    await cluster.publish(V2)
    requests = [begin(V2, f"of {holder}", holder) for holder in ("one", "other")]
    answers = await asyncio.gather(*(_began(decoder, request) for request in requests))
    (winner,) = [request.holder for request, error in zip(requests, answers, strict=True) if error is None]
    (refused,) = [error for error in answers if error is not None]
    assert refused.metadata == {"holder": winner, "version": "1.2", "update_id": f"of {winner}"}
    await decoder.control.ApplyUpdate(apply(f"of {winner}"))
    assert await state_of(decoder) == (SERVING, V2)


async def _began(member, request) -> UpdateInProgress | None:
    try:
        with rpc_errors():
            await member.control.BeginUpdate(request)
    except UpdateInProgress as error:
        return error
    return None


async def test_begin_apply_and_finish_answer_a_repeat_the_same(cluster, refusal):
    decoder = cluster.members[1]
    await cluster.publish(V2)
    begun = [await decoder.control.BeginUpdate(begin(V2)) for _ in range(2)]
    applied = [await decoder.control.ApplyUpdate(apply()) for _ in range(2)]
    finished = [await decoder.control.FinishUpdate(finish()) for _ in range(3)]
    assert begun[0] == begun[1]
    assert applied[0] == applied[1]
    assert finished[0] == finished[1] == finished[2]
    assert await decoder.control.ApplyUpdate(apply()) == applied[0]  # after its end as well
    assert decoder.engine.updates == 2  # the first weights, and one swap
    await decoder.control.AbortUpdate(worker_pb2.AbortUpdateRequest(update_id="u"))  # too late
    assert await state_of(decoder) == (SERVING, V2)
    assert await refusal(decoder.control.BeginUpdate(begin(V2, "again"))) == "VERSION_NOT_NEWER"
    assert await refusal(decoder.control.FinishUpdate(finish("unheard of"))) == "UPDATE_NOT_OPEN"


# --- Versions that are wrong -------------------------------------------------------------------------


def tensors_of(cluster, version: PolicyVersion) -> dict[str, np.ndarray]:
    from slipstream.models.checkpoint import to_hf

    return {name: tensor.numpy().copy() for name, tensor in to_hf(cluster.model(version)).items()}


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "not finite"])
async def test_a_version_that_is_not_the_models_is_refused_before_the_engine_is_touched(cluster, refusal, fault):
    decoder = cluster.members[1]
    tensors = tensors_of(cluster, V2)
    name = max(tensors, key=lambda name: tensors[name].size)
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["model.layers.7.norm.weight"] = np.ones(3, np.float32)
    elif fault == "shape":
        tensors[name] = tensors[name][:-1]
    else:
        tensors[name][0, 0] = np.nan
    await cluster.transport.publish(V2, tensors, Probe((1,), (), 1.0))
    assert await refusal(decoder.control.BeginUpdate(begin(V2))) == "WEIGHTS_CORRUPT"
    assert (await state_of(decoder), decoder.engine.updates) == ((STALE, V1), 1)
    assert await refusal(decoder.control.ApplyUpdate(apply())) == "UPDATE_NOT_OPEN"
    await cluster.publish(V3)
    await decoder.update(V3, "next")
    assert await state_of(decoder) == (SERVING, V3)


async def test_a_tensor_that_is_there_twice_is_never_sealed(cluster, refusal):
    decoder = cluster.members[1]
    slices, buffers = describe_tensors(tensors_of(cluster, V2))
    await cluster.transport.open_version(V2)
    await cluster.transport.publish_shard(V2, (*slices, slices[0]), [*buffers, buffers[0]])
    with pytest.raises(WeightsCorrupt, match="do not tile it"):
        await cluster.transport.seal_version(V2, Probe((1,), (), 1.0))
    assert await refusal(decoder.control.BeginUpdate(begin(V2))) == "WEIGHT_VERSION_UNKNOWN"
    assert (await state_of(decoder), decoder.engine.updates) == ((SERVING, V1), 1)


async def test_a_checksum_that_differs_in_the_pause_puts_the_old_weights_back(cluster, refusal):
    decoder = cluster.members[1]
    stream = Stream(cluster, decoder)
    await stream.flowing()
    slices, buffers = describe_tensors(tensors_of(cluster, V2))
    wrong = (replace(slices[0], checksum=slices[0].checksum ^ 1), *slices[1:])
    await cluster.transport.open_version(V2)
    await cluster.transport.publish_shard(V2, wrong, buffers)
    await cluster.transport.seal_version(V2, Probe((1,), (), 1.0))
    await decoder.control.BeginUpdate(begin(V2))  # its bytes are as announced
    assert await refusal(decoder.control.ApplyUpdate(apply())) == "WEIGHTS_CORRUPT"
    assert (await state_of(decoder), decoder.engine.updates) == ((STALE, V1), 2)
    assert slices[0].name in (await decoder.describe()).stale_reason
    ((tokens, _, versions),) = await stream.ended()
    assert_untouched(cluster, tokens, versions)


async def test_a_probe_out_of_tolerance_lets_no_token_of_the_new_weights_out(cluster, refusal):
    decoder = cluster.members[1]
    stream = Stream(cluster, decoder, samples=3)
    await stream.flowing()
    await cluster.publish(V2, probe_error=0.5)
    await decoder.control.BeginUpdate(begin(V2))
    assert await refusal(decoder.control.ApplyUpdate(apply())) == "PROBE_FAILED"
    assert await state_of(decoder) == (STALE, V1)
    for tokens, _, versions in await stream.ended():
        assert_untouched(cluster, tokens, versions)


# --- Requests in flight ------------------------------------------------------------------------------


async def test_no_token_of_the_new_weights_comes_before_their_verdict(cluster):
    decoder = cluster.members[1]
    await cluster.publish(V2)
    stream = Stream(cluster, decoder)
    await stream.flowing()
    engine = decoder.engine
    engine.verdict.clear()
    engine.verdict_asked.clear()
    with engine.between_steps():
        await decoder.control.BeginUpdate(begin(V2))
        applying = asyncio.create_task(_applied(decoder))
        assert await asyncio.to_thread(engine.verdict_asked.wait, WAIT_S)
    await asyncio.sleep(0.2)
    assert set(stream.samples[0][2]) == {V1}
    assert await state_of(decoder) == (SERVING, V1)
    engine.verdict.set()
    await applying
    ((tokens, _, versions),) = await stream.ended()
    assert (len(tokens), set(versions)) == (400, {V1, V2})


async def _applied(member) -> worker_pb2.ApplyUpdateResponse:
    return await member.control.ApplyUpdate(apply())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_in_flight_are_those_of_an_oracle_that_swaps_at_the_same_token_and_keeps_its_kv(
    cluster, temperature
):
    decoder = cluster.members[1]
    for version in (V2, V3):
        await cluster.publish(version)
    stream = Stream(cluster, decoder, samples=3, temperature=temperature)
    for version in (V2, V3):
        await stream.flowing()
        with decoder.engine.between_steps():
            applied = await decoder.update(version, f"to {version}")
        assert applied.in_flight_sample_count == 3
    for tokens, logprobs, versions in await stream.ended():
        assert versions == sorted(versions)
        assert set(versions) == {V1, V2, V3}
        expected = logprobs_over_swaps([cluster.model(version) for version in versions], PROMPT, tokens)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert torch.tensor(logprobs) == pytest.approx(chosen, abs=1e-4)
        if temperature == 0:
            assert (expected.amax(-1) - chosen).max() < 1e-4
        pure = cluster.logprobs(V3, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        late = versions.index(V3)
        assert (pure[late:] - expected[late:]).abs().max() > 1e-3  # what a fresh engine would say is something else


async def test_requests_after_an_update_are_a_fresh_engines_in_both_pools(cluster):
    prefiller, decoder = cluster.members
    await cluster.publish(V2)
    stream = Stream(cluster, decoder)  # something that keeps old KV in the same pool
    await stream.flowing()
    for member in (decoder, prefiller):
        await member.update(V2)
    fresh = await cluster.add_worker("decode", "decode-2")
    await fresh.serving(V2)
    salt = {"salt": "run/1.2", "min_policy_version": V2.to_proto(), "sampling": {"max_new_tokens": 40}}
    prefill = {name: salt[name] for name in ("salt", "min_policy_version")}
    prefilled = await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, "after", **prefill))
    for kv in (prefilled.kv, None):
        request = cluster.decode_request(decoder, kv, f"after {kv is None}", 4, **salt)
        samples = await cluster.samples(decoder, request)
        request.worker_epoch = fresh.epoch
        request.ClearField("kv")
        expected = await cluster.samples(fresh, request)
        assert [list(sample.token_ids) for sample in samples] == [list(sample.token_ids) for sample in expected]
        for sample, other in zip(samples, expected, strict=True):
            assert list(sample.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)
            assert {PolicyVersion.from_proto(span.kv_oldest_version) for span in sample.spans} == {V2}
    await stream.ended()


# --- Workers that die --------------------------------------------------------------------------------


async def test_a_worker_that_is_restarted_in_an_update_takes_nothing_until_it_is_refitted(
    cluster, start_turns, refusal
):
    decoder = cluster.members[1]
    turns = await start_turns()
    await cluster.publish(V2)
    await decoder.control.BeginUpdate(begin(V2))
    point = decoder.engine.points["update"]
    point.close()
    applying = asyncio.create_task(refusal(decoder.control.ApplyUpdate(apply())))
    await point.reached()
    earlier = decoder.epoch
    cluster.members.remove(decoder)
    await decoder.server.stop(None)
    assert await applying == "UNREACHABLE"
    point.open()  # to let the dead one end
    await decoder.stop()
    restarted = await cluster.restart(decoder, follow=False)
    assert await state_of(restarted) == (STARTING, PolicyVersion(0, 0))
    assert await refusal(restarted.control.ApplyUpdate(apply())) == "UPDATE_NOT_OPEN"
    stale = begin(V2)
    stale.worker_epoch = earlier
    assert await refusal(restarted.control.BeginUpdate(stale)) == "WORKER_STALE"
    for epoch in (earlier, restarted.epoch):
        request = cluster.decode_request(restarted, None, "early", worker_epoch=epoch)
        assert await refusal(restarted.decode.Decode(request)) == "WORKER_STALE"
    error = await refused(turns.ask(PROMPT, deadline_s=1.0))
    assert error.reason == "DEADLINE_EXCEEDED"
    assert not (await turns.workers())["decode-1"].routable
    cluster.state.versions["serving"] = V1
    restarted.tasks.append(asyncio.create_task(restarted.worker.updates.follow()))
    await restarted.serving(V1)  # what the run serves, not the newest
    assert [len(each.answer) for each in (await turns.ask(PROMPT)).rollouts] == [8, 8]
