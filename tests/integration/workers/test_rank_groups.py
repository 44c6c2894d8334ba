"""Data-parallel groups: an update reaches all ranks or none, whoever dies."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, suppress

import grpc
import numpy as np
import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.errors import from_rpc_error
from slipstream.common.rank_groups import RankGroup
from slipstream.common.state import SERVING
from slipstream.common.version import PolicyVersion
from slipstream.engine.worker.ballot import PROBE
from slipstream.weights.transport import GrpcWeightTransport
from tests.integration.workers.conftest import LEASE_MS, WAIT_S

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
SERVING_STATE, STALE_STATE = worker_pb2.WORKER_STATE_SERVING, worker_pb2.WORKER_STATE_STALE
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def begin(version: PolicyVersion, update_id: str = "u", holder: str = "keeper"):
    return worker_pb2.BeginUpdateRequest(
        update_id=update_id, holder=holder, version=version.to_proto(), lease_ttl_ms=LEASE_MS
    )


def apply(update_id: str = "u") -> worker_pb2.ApplyUpdateRequest:
    return worker_pb2.ApplyUpdateRequest(update_id=update_id)


async def states(ranks) -> list[tuple[PolicyVersion, int]]:
    answers = [await rank.describe() for rank in ranks]
    return [(PolicyVersion.from_proto(answer.version), answer.state) for answer in answers]


async def until(ranks, expected: list[tuple[PolicyVersion, int]]) -> None:
    async with asyncio.timeout(30):
        while await states(ranks) != expected:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.02)


class Damaged(GrpcWeightTransport):
    """Brings versions whose bytes pass every check on the way, and then one of them changes in memory."""

    async def fetch(self, manifest):
        tensors = await super().fetch(manifest)
        if manifest.version > V1:
            name = next(name for name, values in tensors.items() if values.ndim == 2)
            tensors[name] = np.copy(tensors[name])
            tensors[name][0, 0] += 1
        return tensors


class Interrupted:
    """Stops a rank's engine between its checksums and its probe, for good or until it is let go."""

    def __init__(self, rank) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        core = rank.worker.engine._core
        probe = core.probe

        def wait_and_probe(token_ids):
            self.reached.set()
            assert self.go_on.wait(60)
            return probe(token_ids)

        core.probe = wait_and_probe

    async def wait(self) -> None:
        async with asyncio.timeout(30):
            while not self.reached.is_set():  # noqa: ASYNC110 set by another thread
                await asyncio.sleep(0.01)


async def voted(leader, stage: str, ranks: set[int]) -> None:
    """Wait until a leader has the votes of others for a stage."""
    ballot = leader.worker.updater._update.ballot
    async with asyncio.timeout(WAIT_S):
        while not ballot._votes.get(stage, {}).keys() >= ranks:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.005)


@pytest.fixture
async def ranks(empty_cluster):
    """A decode group of three ranks that serves version 1.1."""
    await empty_cluster.publish(V1)
    ranks = await empty_cluster.add_group("decode", 3)
    for rank in ranks:
        await rank.serving(V1)
    return ranks


async def test_every_rank_says_which_group_it_is_of(ranks):
    leader = ranks[0].worker.identity.address
    for number, rank in enumerate(ranks):
        described = await rank.describe()
        assert RankGroup.of(described) == RankGroup("decode-1", number, 3, leader)
        async for report in rank.control.WatchLoad(worker_pb2.WatchLoadRequest()):
            assert RankGroup.of(report) == RankGroup.of(described)
            break


async def test_an_update_of_the_leader_reaches_all_ranks_with_their_requests_in_flight(empty_cluster, ranks):
    long = {"max_new_tokens": 300, "temperature": 1.0}
    await empty_cluster.publish(V2)
    streams = [
        asyncio.create_task(empty_cluster.samples(rank, empty_cluster.decode_request(rank, None, sampling=long)))
        for rank in ranks
    ]
    async with asyncio.timeout(30):
        while not all(rank.worker.engine.load().decoded_tokens for rank in ranks):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    with ExitStack() as stack:
        for rank in ranks:
            stack.enter_context(rank.engine.between_steps())
        applied = await ranks[0].update(V2)
    assert applied.in_flight_sample_count == 3
    assert await states(ranks) == [(V2, SERVING_STATE)] * 3
    for stream in streams:
        (sample,) = await stream
        assert {PolicyVersion.from_proto(span.version) for span in sample.spans} == {V1, V2}
    for rank in ranks:
        fresh = empty_cluster.decode_request(rank, None, "g1.0", salt="run/1.2", sampling={"temperature": 0.0})
        (sample,) = await empty_cluster.samples(rank, fresh)
        assert list(sample.token_ids) == empty_cluster.greedy(V2, PROMPT, 8)


async def test_a_rank_that_does_not_lead_names_the_leader(ranks, refusal):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ranks[1].control.BeginUpdate(begin(V2))
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["leader"]) == ("NOT_GROUP_LEADER", ranks[0].worker.identity.address)
    assert await refusal(ranks[2].control.ApplyUpdate(apply())) == "NOT_GROUP_LEADER"
    vote = worker_pb2.VoteUpdateRequest(update_id="u", rank=1, stage="probe")
    assert await refusal(ranks[1].control.VoteUpdate(vote)) == "NOT_GROUP_LEADER"
    assert await refusal(ranks[0].control.VoteUpdate(vote)) == "UPDATE_NOT_OPEN"


async def test_weights_that_one_rank_cannot_take_are_put_back_by_all(empty_cluster):
    await empty_cluster.publish(V1)
    ranks = await empty_cluster.add_group("decode", 2)
    damaged = await empty_cluster.restart(ranks[1], transport=Damaged(empty_cluster.channel))
    for rank in (ranks[0], damaged):
        await rank.serving(V1)
    await empty_cluster.publish(V2)
    await ranks[0].control.BeginUpdate(begin(V2))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ranks[0].control.ApplyUpdate(apply())
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["rank"]) == ("WEIGHTS_CORRUPT", "1")
    assert await states([ranks[0], damaged]) == [(V1, SERVING_STATE), (V1, STALE_STATE)]
    healed = await empty_cluster.restart(damaged)
    await healed.serving(V1)
    await ranks[0].update(V2, "again")
    assert await states([ranks[0], healed]) == [(V2, SERVING_STATE)] * 2


async def test_a_version_that_one_rank_cannot_fetch_is_begun_at_none(empty_cluster, ranks, refusal):
    await empty_cluster.publish(V2)
    empty_cluster.members.remove(ranks[2])
    await ranks[2].stop()
    assert await refusal(ranks[0].control.BeginUpdate(begin(V2))) == "UNREACHABLE"
    assert await refusal(ranks[0].control.ApplyUpdate(apply())) == "UPDATE_NOT_OPEN"
    assert all(rank.worker.updates._open is None for rank in ranks[:2])
    assert await states(ranks[:2]) == [(V1, SERVING_STATE)] * 2


async def test_a_rank_that_dies_in_its_swap_takes_the_new_weights_from_nobody_and_comes_back_to_the_old(
    empty_cluster, ranks, refusal
):
    await empty_cluster.publish(V2)
    await ranks[0].control.BeginUpdate(begin(V2))
    held = Interrupted(ranks[1])
    call = asyncio.create_task(refusal(ranks[0].control.ApplyUpdate(apply())))
    await held.wait()
    await ranks[1].server.stop(None)  # as its process's end does
    assert await call == "UNREACHABLE"
    assert await states([ranks[0], ranks[2]]) == [(V1, SERVING_STATE)] * 2
    held.go_on.set()
    again = await empty_cluster.restart(ranks[1])
    await again.serving(V1)
    await ranks[0].update(V2, "again")
    assert await states([ranks[0], again, ranks[2]]) == [(V2, SERVING_STATE)] * 3


async def test_a_rank_that_is_late_is_a_veto(empty_cluster, refusal):
    await empty_cluster.publish(V1)
    ranks = await empty_cluster.add_group("decode", 2, vote_timeout_s=2.0)
    for rank in ranks:
        await rank.serving(V1)
    await empty_cluster.publish(V2)
    await ranks[0].control.BeginUpdate(begin(V2))
    held = Interrupted(ranks[1])
    call = asyncio.create_task(refusal(ranks[0].control.ApplyUpdate(apply())))
    await held.wait()
    async with asyncio.timeout(30):
        while ranks[0].worker.updates._open is not None:  # noqa: ASYNC110 observed from outside
            await asyncio.sleep(0.02)
    assert not call.done()
    held.go_on.set()
    assert await call == "GROUP_VETOED"
    assert await states(ranks) == [(V1, SERVING_STATE)] * 2


async def test_ranks_that_lose_their_leader_before_the_verdict_are_stale_until_the_group_is_updated(
    empty_cluster, ranks
):
    await empty_cluster.publish(V2)
    await ranks[0].control.BeginUpdate(begin(V2))
    held = Interrupted(ranks[0])
    call = asyncio.ensure_future(ranks[0].control.ApplyUpdate(apply()))
    await held.wait()
    await voted(ranks[0], PROBE, {1, 2})  # and wait
    await ranks[0].server.stop(None)
    with suppress(grpc.aio.AioRpcError):
        await call
    await until(ranks[1:], [(V1, STALE_STATE)] * 2)
    held.go_on.set()
    empty_cluster.state.versions[SERVING] = V1
    leader = await empty_cluster.restart(ranks[0])
    await leader.serving(V1)
    await leader.update(V2, "again")
    assert await states([leader, *ranks[1:]]) == [(V2, SERVING_STATE)] * 3


async def test_the_caller_may_die_before_the_swap_during_it_and_after(empty_cluster, ranks, refusal):
    await empty_cluster.publish(V2)
    await ranks[0].control.BeginUpdate(begin(V2, "dead", "dead"))
    assert await refusal(ranks[0].control.BeginUpdate(begin(V2))) == "UPDATE_IN_PROGRESS"
    for rank in ranks:
        await rank.lease_ends()  # the old version goes on
    assert await states(ranks) == [(V1, SERVING_STATE)] * 3
    await ranks[0].control.BeginUpdate(begin(V2))
    held = Interrupted(ranks[1])
    call = ranks[0].control.ApplyUpdate(apply())
    await asyncio.sleep(0)
    await held.wait()
    call.cancel()  # the swap goes on to its end, and nobody finishes it
    held.go_on.set()
    for rank in ranks:
        await rank.serving(V2)
    await empty_cluster.publish(V3)
    await ranks[0].update(V3, "next")
    assert await states(ranks) == [(V3, SERVING_STATE)] * 3


async def test_a_restarted_rank_takes_what_its_group_serves_whatever_the_run_serves(empty_cluster, ranks):
    empty_cluster.state.versions[SERVING] = V1
    await empty_cluster.publish(V2)
    await ranks[0].update(V2)
    for number in (0, 2):
        ranks[number] = await empty_cluster.restart(ranks[number])
        await ranks[number].serving(V2)
    assert await states(ranks) == [(V2, SERVING_STATE)] * 3


async def test_a_rank_that_fell_behind_is_brought_up_alone(empty_cluster, ranks, refusal):
    await empty_cluster.publish(V2)
    await ranks[0].update(V2)
    ranks[1].worker.updates._fail("told so by the test")
    pauses = [rank.worker.engine.load().decode_steps for rank in ranks]
    await ranks[0].update(V2, "heal")
    assert await states(ranks) == [(V2, SERVING_STATE)] * 3
    assert [rank.worker.engine.load().decode_steps for rank in ranks] == pauses
    assert await refusal(ranks[0].control.BeginUpdate(begin(V2, "no need"))) == "VERSION_NOT_NEWER"


async def test_begin_and_finish_may_be_repeated_and_an_abort_reaches_all(empty_cluster, ranks, refusal):
    await empty_cluster.publish(V2)
    for _ in range(2):
        await ranks[0].control.BeginUpdate(begin(V2))
    await ranks[0].control.AbortUpdate(worker_pb2.AbortUpdateRequest(update_id="u"))
    assert all(rank.worker.updates._open is None for rank in ranks)
    assert await refusal(ranks[0].control.ApplyUpdate(apply())) == "UPDATE_NOT_OPEN"
    await ranks[0].control.BeginUpdate(begin(V2, "w"))
    first = await ranks[0].control.ApplyUpdate(apply("w"))
    assert await ranks[0].control.ApplyUpdate(apply("w")) == first
    for _ in range(2):
        finish = worker_pb2.FinishUpdateRequest(update_id="w")
        finished = await ranks[0].control.FinishUpdate(finish)
        assert PolicyVersion.from_proto(finished.version) == V2
