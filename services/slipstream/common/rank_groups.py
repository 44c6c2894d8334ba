"""Data-parallel groups as the router and the version keeper see them: a group takes requests whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.version import PolicyVersion


@dataclass(frozen=True)
class RankGroup:
    """A rank's place in its group. Rank 0 leads: it alone takes the calls of an update."""

    group_id: str
    rank: int
    size: int
    leader_address: str

    @classmethod
    def of(cls, message: Any) -> RankGroup | None:
        """The group of a worker's description or load report; None outside of one."""
        group: worker_pb2.RankGroup = message.group
        if not group.group_id:
            return None
        return cls(group.group_id, group.rank, group.size, group.leader_address)

    def to_proto(self) -> worker_pb2.RankGroup:
        return worker_pb2.RankGroup(
            group_id=self.group_id, rank=self.rank, size=self.size, leader_address=self.leader_address
        )


class Rank(Protocol):
    """A worker as its observer keeps it."""

    @property
    def group(self) -> RankGroup | None: ...

    @property
    def version(self) -> PolicyVersion: ...


R = TypeVar("R", bound=Rank)


def by_group(workers: Iterable[R]) -> dict[str, list[R]]:
    """The ranks of each group that were heard of, in order of rank."""
    groups: dict[str, list[R]] = {}
    for worker in workers:
        if worker.group is not None:
            groups.setdefault(worker.group.group_id, []).append(worker)
    return {name: sorted(ranks, key=_rank) for name, ranks in groups.items()}


def in_whole_groups(workers: Iterable[R], healthy: Callable[[R], bool]) -> list[R]:
    """The healthy workers, without the ranks of groups that lack a healthy rank or serve several versions.

    A group steps together, so one dead rank makes all its endpoints unroutable.
    """
    workers = list(workers)
    whole = {name for name, ranks in by_group(workers).items() if _is_whole(ranks, healthy)}
    return [
        worker for worker in workers if healthy(worker) and (worker.group is None or worker.group.group_id in whole)
    ]


def _is_whole(ranks: list[R], healthy: Callable[[R], bool]) -> bool:
    size = max(worker.group.size for worker in ranks if worker.group is not None)
    return (
        [_rank(worker) for worker in ranks] == list(range(size))
        and all(map(healthy, ranks))
        and len({worker.version for worker in ranks}) == 1
    )


def _rank(worker: Rank) -> int:
    return -1 if worker.group is None else worker.group.rank
