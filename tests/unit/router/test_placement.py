"""The placement policy and what it stands on."""

from __future__ import annotations

import struct

import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.errors import NoWorker, PoolSaturated
from slipstream.common.version import PolicyVersion
from slipstream.router.leases import Placement, PlacementLeases
from slipstream.router.placement import Demand, PlacementPolicy
from slipstream.router.pool import PrefixIndex, Worker

POLICY = PlacementPolicy(silence_s=3.0, saturation_fraction=0.9, affinity_slack_samples=16)
NOW_S = 100.0


def worker(replica: str, step: int = 3, running: int = 0, state: int = worker_pb2.WORKER_STATE_SERVING) -> Worker:
    made = Worker(replica, f"{replica}:1", worker_pb2.WORKER_ROLE_DECODE, PrefixIndex(100))
    made.limits.max_running_samples = 64
    made.heard(report(step=step, running=running, state=state), NOW_S)
    return made


def report(
    step: int = 3,
    running: int = 0,
    state: int = worker_pb2.WORKER_STATE_SERVING,
    epoch: str = "a",
    stored: tuple[int, ...] = (),
    reset: bool = False,
) -> worker_pb2.WatchLoadResponse:
    message = worker_pb2.WatchLoadResponse(epoch=epoch, kv_events_reset=reset)
    message.state = state  # type: ignore[assignment]
    message.version.CopyFrom(PolicyVersion(1, step).to_proto())
    message.load.running_sample_count = running
    message.kv_events = b"".join(struct.pack("<BQ", 1, block_hash) for block_hash in stored)
    return message


def choose(workers: list[Worker], **demand: object) -> str:
    asked = {"block_hashes": (), "sample_count": 8, "min_version": PolicyVersion(1, 3), **demand}
    return POLICY.choose("decode", workers, Demand(**asked), NOW_S).replica  # type: ignore[arg-type]


def test_the_least_busy_worker_is_chosen() -> None:
    assert choose([worker("a", running=20), worker("b", running=4)]) == "b"


def test_a_cached_prefix_wins_until_its_worker_is_much_busier() -> None:
    warm, cold = worker("warm", running=10), worker("cold")
    warm.heard(report(running=10, stored=(7, 8)), NOW_S)
    assert choose([warm, cold], block_hashes=(7, 8, 9)) == "warm"
    warm.heard(report(running=20), NOW_S)
    assert choose([warm, cold], block_hashes=(7, 8, 9)) == "cold"


def place(
    prefill_pool: list[Worker], decode_pool: list[Worker], threshold: int, hashes: tuple[int, ...], tokens: int
) -> tuple[str | None, str]:
    policy = PlacementPolicy(3.0, 0.9, 16, remote_prefill_min_uncached_tokens=threshold)
    prefill, decode = policy.place(prefill_pool, decode_pool, Demand(hashes, 8, PolicyVersion(1, 3), (), tokens), NOW_S)
    return prefill.replica if prefill else None, decode.replica


def test_a_prompt_goes_through_the_prefill_pool_where_its_decode_worker_lacks_as_many_tokens() -> None:
    cold, warm, prefill = worker("cold"), worker("warm", running=10), worker("prefill")
    for each in (cold, warm):
        each.limits.block_size_tokens = 4
    warm.heard(report(running=10, stored=(7, 8)), NOW_S)
    assert place([prefill], [cold, warm], 4, (7, 8, 9), 12) == (None, "warm")  # 11 less 8: it lacks 3
    assert place([prefill], [cold, warm], 4, (7, 8, 9), 13) == ("prefill", "warm")
    assert place([prefill], [cold, warm], 4, (), 4) == (None, "cold")  # short: a cold worker lacks 3 as well
    assert place([prefill], [cold, warm], 4, (1, 2, 3), 12) == ("prefill", "cold")  # as many tokens, none of them here
    assert place([prefill], [cold, warm], 0, (7, 8), 9) == ("prefill", "warm")


def test_without_a_prefill_pool_decode_workers_compute_all_prompts() -> None:
    assert place([], [worker("decode")], 0, (1, 2, 3), 10_000) == (None, "decode")
    with pytest.raises(NoWorker):  # a pool whose workers are away is not the same
        place([worker("away", state=worker_pb2.WORKER_STATE_STALE)], [worker("decode")], 0, (), 100)


def test_a_saturated_worker_loses_its_affinity() -> None:
    warm, cold = worker("warm"), worker("cold", running=50)
    warm.heard(report(running=56, stored=(7,)), NOW_S)
    assert choose([warm, cold], block_hashes=(7,), sample_count=4) == "cold"


def test_a_worker_below_the_asked_version_is_never_offered() -> None:
    assert choose([worker("old", step=2), worker("new", step=3, running=40)]) == "new"
    with pytest.raises(NoWorker) as caught:
        choose([worker("old", step=2)])
    assert caught.value.metadata == {"pool": "decode", "min_policy_version": "1.3"}


@pytest.mark.parametrize(
    "state", [worker_pb2.WORKER_STATE_STALE, worker_pb2.WORKER_STATE_DRAINING, worker_pb2.WORKER_STATE_STARTING]
)
def test_only_a_serving_worker_is_offered(state: int) -> None:
    with pytest.raises(NoWorker):
        choose([worker("a", state=state)])


def test_a_silent_worker_is_out_and_a_lost_one_at_once() -> None:
    silent = worker("silent")
    assert silent.routable(NOW_S + 2.9, 3.0)
    assert not silent.routable(NOW_S + 3.1, 3.0)
    silent.lost()
    assert not silent.routable(NOW_S, 3.0)


def test_replicas_to_avoid_are_offered_only_when_nothing_else_is_left() -> None:
    a, b = worker("a"), worker("b", running=30)
    assert choose([a, b], avoid_replicas={"a"}) == "b"
    assert choose([a], avoid_replicas={"a"}) == "a"


def test_full_pools_are_saturated_but_an_idle_worker_takes_a_group_larger_than_itself() -> None:
    with pytest.raises(PoolSaturated):
        choose([worker("a", running=60), worker("b", running=60)])
    assert choose([worker("a", running=60), worker("b")], sample_count=100) == "b"


def test_a_new_epoch_forgets_the_cached_prefix() -> None:
    restarted = worker("a")
    restarted.heard(report(stored=(1, 2)), NOW_S)
    assert restarted.prefix.matched_blocks([1, 2, 3]) == 2
    restarted.heard(report(epoch="b"), NOW_S)
    assert restarted.prefix.matched_blocks([1, 2, 3]) == 0


def test_the_prefix_index_is_bounded_and_follows_removals() -> None:
    index = PrefixIndex(3)
    index.apply(b"".join(struct.pack("<BQ", 1, n) for n in range(5)))
    assert len(index) == 3
    index.apply(struct.pack("<BQ", 2, 4) + struct.pack("<BQ", 1, 9) + b"torn")
    assert index.matched_blocks([9]) == 1
    assert index.matched_blocks([4]) == 0
    index.apply(struct.pack("<BQ", 3, 0))
    assert len(index) == 0


def test_what_earlier_processes_of_a_runner_hold_ends_when_a_later_one_says_so() -> None:
    decode = worker("d")
    leases = PlacementLeases(ttl_s=10, capacity=9)
    for name, runner, epoch in (("a", "r-1", "1"), ("b", "r-1", "2"), ("c", "r-1", "3"), ("d", "r-2", "1")):
        leases.add(Placement(name, "g", None, decode, "", "a", 8, NOW_S + 10, runner, epoch))
    leases.add(Placement("e", "g", None, decode, "", "a", 8, NOW_S + 10))  # of one that does not say who it is
    assert leases.end_earlier("r-1", "3") == ["a", "b"]
    assert leases.end_earlier("r-1", "3") == []
    assert [held.placement_id for held in leases.held()] == ["c", "d", "e"]
    assert (decode.busy_samples, decode.placement_count) == (24, 3)


def test_placements_count_until_released_or_expired() -> None:
    prefill, decode = worker("p"), worker("d")
    leases = PlacementLeases(ttl_s=10, capacity=2)
    for number in range(2):
        leases.add(Placement(str(number), "g", prefill, decode, "a", "a", 8, NOW_S + 10 + number))
    assert (decode.busy_samples, prefill.busy_samples, decode.placement_count) == (16, 2, 2)
    with pytest.raises(PoolSaturated):
        leases.add(Placement("2", "g", prefill, decode, "a", "a", 8, NOW_S))
    assert leases.release("1")
    assert not leases.release("1")
    assert leases.expire(NOW_S + 10) == ["0"]
    assert (decode.busy_samples, decode.placement_count, len(leases)) == (0, 0, 0)
    leases.add(Placement("alone", "g", None, decode, "", "a", 8, NOW_S + 10))
    assert (decode.busy_samples, decode.placement_count, prefill.placement_count) == (8, 1, 0)
    assert leases.release("alone")
    assert (decode.busy_samples, decode.placement_count, prefill.placement_count) == (0, 0, 0)
