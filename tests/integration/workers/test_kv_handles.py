"""Handles that are not, or no more, as the prefill worker gave them out."""

from __future__ import annotations

import json
import time

import pytest
import pytest_asyncio

from slipstream.api.inference.v1 import prefill_pb2
from tests.integration.workers.conftest import both_pools, clustering

ENGINES = ("embedded", "vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT, OTHER = [token % 23 for token in range(40)], [token * 7 % 23 for token in range(40)]


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(make_config, tmp_path, lending):
    async with clustering(make_config, tmp_path, lending()) as cluster:
        yield await both_pools(cluster)


async def test_a_worker_says_by_which_ways_kv_and_weights_come(cluster):
    for member in cluster.members:
        told, engine = (await member.describe()).capabilities, member.engine.capabilities
        assert list(told.kv_transports) in (["nixl"], ["frames"])
        assert tuple(told.kv_transports) == engine.kv_transports
        assert told.weight_transports == ["grpc"]  # what the run's configuration says
        assert told.captures_routes == engine.captures_routes
        assert told.updates_in_flight


async def test_a_decode_worker_takes_the_kv_of_its_prompt_and_salt_from_a_worker_of_the_run_and_no_other(
    cluster, refusal
):
    prefiller, decoder = cluster.members
    count = 0

    async def prefilled(**fields) -> prefill_pb2.KvHandle:
        nonlocal count
        count += 1
        return (await prefiller.prefill.Prefill(cluster.prefill_request(prefiller, f"p{count}", **fields))).kv

    async def asked(kv: prefill_pb2.KvHandle, **fields) -> str:
        request = cluster.decode_request(decoder, kv, f"{kv.transfer_id}-d", **{"prompt": PROMPT, **fields})
        return await refusal(decoder.decode.Decode(request))

    assert await asked(await prefilled(prompt=OTHER)) == "KV_MISMATCH"
    assert await asked(await prefilled(prompt=PROMPT, salt="run/1.0/float32")) == "KV_MISMATCH"
    assert await asked(await prefilled(prompt=PROMPT[:-1])) == "KV_MISMATCH"

    expired = await prefilled(prompt=PROMPT)
    expired.expires_unix_ms = round(time.time() * 1000) - 1
    assert await asked(expired) == "KV_TRANSFER_FAILED"
    changed = [("replica", "prefill-2"), ("token_count", 7), ("address", decoder.address), ("address", "127.0.0.1:9")]
    if prefiller.engine.capabilities.kv_transports != ("frames",):
        another = json.loads((await prefilled(prompt=OTHER)).connector_params)
        changed.append(("connector_params", json.dumps(another).encode()))
    for field, value in changed:
        kv = await prefilled(prompt=PROMPT)
        setattr(kv, field, value)
        assert await asked(kv) == "KV_MISMATCH", field

    kv = await prefilled(prompt=PROMPT)
    request = cluster.decode_request(decoder, kv, prompt=PROMPT, sampling={"temperature": 0.0})
    (sample,) = await cluster.samples(decoder, request)
    assert list(sample.token_ids) == cluster.greedy(cluster.members[0].worker.updates.version, PROMPT, 8)
    # Of what was refused nothing is in the cache under this salt: another prompt's first block is computed anew.
    request = cluster.decode_request(decoder, None, "cold", prompt=OTHER)
    (sample,) = await cluster.samples(decoder, request)
    assert sample.cached_token_count == 0
    for number in range(1, count + 1):  # what nobody took
        prefiller.worker.engine.release_kv(f"p{number}")
    await prefiller.freed()
