"""Groups take requests whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.errors import NoWorker
from slipstream.common.rank_groups import RankGroup, by_group, in_whole_groups
from slipstream.common.version import PolicyVersion
from slipstream.router.placement import Demand, PlacementPolicy
from slipstream.router.pool import PrefixIndex, Worker

V2, V3 = PolicyVersion(1, 2), PolicyVersion(1, 3)
NOW_S = 100.0
SERVING, STALE = worker_pb2.WORKER_STATE_SERVING, worker_pb2.WORKER_STATE_STALE


@dataclass
class Rank:
    group: RankGroup | None
    version: PolicyVersion = V3
    healthy: bool = True


def ranks(name: str, *healthy: bool, size: int = 0) -> list[Rank]:
    return [Rank(RankGroup(name, rank, size or len(healthy), "a:1"), healthy=good) for rank, good in enumerate(healthy)]


def whole(workers: list[Rank]) -> list[Rank]:
    return in_whole_groups(workers, lambda rank: rank.healthy)


def test_one_dead_rank_takes_its_group_out_and_no_other() -> None:
    broken, good, alone = ranks("b", True, False, True), ranks("a", True, True), Rank(None)
    assert whole([*broken, alone, *good]) == [alone, *good]


def test_a_group_with_a_rank_that_was_never_seen_is_not_whole() -> None:
    assert whole(ranks("a", True, True, size=3)) == []


def test_a_group_that_serves_two_versions_is_not_whole() -> None:
    group = ranks("a", True, True)
    group[1].version = V2
    assert whole(group) == []
    group[0].version = V2
    assert whole(group) == group


def test_a_worker_outside_of_groups_counts_for_itself() -> None:
    assert whole([Rank(None, healthy=False), good := Rank(None)]) == [good]


def test_ranks_are_listed_in_order() -> None:
    first, second = ranks("a", True, True)
    assert by_group([second, Rank(None), first]) == {"a": [first, second]}


def routed(replica: str, rank: int, state: worker_pb2.WorkerState = SERVING) -> Worker:
    worker = Worker(replica, f"{replica}:1", worker_pb2.WORKER_ROLE_DECODE, PrefixIndex(10))
    worker.limits.max_running_samples = 64
    group = RankGroup("decode-1", rank, 2, "decode-1-0:1").to_proto()
    report = worker_pb2.WatchLoadResponse(epoch="a", state=state, version=V3.to_proto(), group=group)
    worker.heard(report, NOW_S)
    return worker


def choose(workers: list[Worker], now_s: float = NOW_S) -> str:
    policy = PlacementPolicy(silence_s=3.0, saturation_fraction=0.9, affinity_slack_samples=16)
    return policy.choose("decode", workers, Demand((), 1, V3), now_s).replica


def test_a_router_offers_no_rank_of_a_group_with_a_stale_or_lost_one() -> None:
    first, second = routed("decode-1-0", 0), routed("decode-1-1", 1)
    assert choose([first, second]) in ("decode-1-0", "decode-1-1")
    with pytest.raises(NoWorker):
        choose([first, routed("decode-1-1", 1, STALE)])
    second.lost()
    with pytest.raises(NoWorker):
        choose([first, second])
