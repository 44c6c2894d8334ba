"""The update of a data-parallel group: its calls reach all ranks or none.

| rank | takes | does |
|---|---|---|
| sole | the calls of an update | them, alone |
| leader (rank 0) | the calls of an update, votes | them at each rank that is behind, itself too; counts the votes |
| follower | the leader's calls | them, and votes before it goes on (`ballot.py`) |

Begin opens the update at every rank, each with its bytes checked; if one cannot, it is dropped at all. Apply is two
phases: in the pause every rank votes, and no rank goes on with weights that another does not have. A rank that dies or
fails before the commit is a veto. A rank that cannot learn the verdict puts the old weights back and is STALE, since
others may have the new ones: the group is unroutable until it is updated again, which brings those ranks alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import structlog

from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.common.errors import (
    GroupSplit,
    GroupVetoed,
    NotGroupLeader,
    Unreachable,
    UpdateInProgress,
    UpdateNotOpen,
    VersionNotNewer,
    from_rpc_error,
)
from slipstream.common.exits import ServiceFailed
from slipstream.common.rank_groups import RankGroup
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import UpdateReport
from slipstream.engine.worker.ballot import FAILED, SLACK_S, Ballot, ThreadVoice
from slipstream.engine.worker.updates import Applied, WorkerUpdates

log = structlog.get_logger()

BEGIN_TIMEOUT_S = 120.0
APPLY_TIMEOUT_S = 300.0
SHORT_TIMEOUT_S = 5.0
RECONNECT_S = 1.1
LOOK_TIMEOUT_S = 2.0
LOOK_INTERVAL_S = 1.0
SILENT_LOOKS = 3
"""Questions without an answer after which a rank counts as gone."""


class Updater(Protocol):
    """Who a worker's update calls go to."""

    async def begin(self, request: worker_pb2.BeginUpdateRequest) -> int: ...
    async def apply(self, request: worker_pb2.ApplyUpdateRequest) -> Applied: ...
    async def finish(self, request: worker_pb2.FinishUpdateRequest) -> None: ...
    async def abort(self, request: worker_pb2.AbortUpdateRequest) -> None: ...
    async def vote(self, request: worker_pb2.VoteUpdateRequest) -> worker_pb2.VoteUpdateResponse: ...


class SoleRank:
    """A worker outside of any group."""

    def __init__(self, updates: WorkerUpdates) -> None:
        self._updates = updates

    async def begin(self, request: worker_pb2.BeginUpdateRequest) -> int:
        return await _begin_here(self._updates, request)

    async def apply(self, request: worker_pb2.ApplyUpdateRequest) -> Applied:
        return await self._updates.apply(request.update_id)

    async def finish(self, request: worker_pb2.FinishUpdateRequest) -> None:
        self._updates.finish(request.update_id)

    async def abort(self, request: worker_pb2.AbortUpdateRequest) -> None:
        self._updates.abort(request.update_id)

    async def vote(self, request: worker_pb2.VoteUpdateRequest) -> worker_pb2.VoteUpdateResponse:
        raise NotGroupLeader("this worker leads no group", leader="")


class Follower:
    """A rank that is not the leader: takes the leader's calls, and those alone."""

    def __init__(
        self, updates: WorkerUpdates, group: RankGroup, leader: worker_pb2_grpc.WorkerServiceStub, vote_timeout_s: float
    ) -> None:
        self._updates = updates
        self._group = group
        self._leader = leader
        self._vote_timeout_s = vote_timeout_s

    async def begin(self, request: worker_pb2.BeginUpdateRequest) -> int:
        self._check(request.leader_epoch)
        return await _begin_here(self._updates, request)

    async def apply(self, request: worker_pb2.ApplyUpdateRequest) -> Applied:
        self._check(request.leader_epoch)

        async def cast(stage: str, held_slices: bytes, failure: str) -> str:
            vote = worker_pb2.VoteUpdateRequest(
                update_id=request.update_id,
                rank=self._group.rank,
                leader_epoch=request.leader_epoch,
                stage=stage,
                held_slices=held_slices,
                failure=failure[:4096],
            )
            answer = await _answer(self._leader.VoteUpdate(vote, timeout=self._vote_timeout_s + SLACK_S))
            return "" if answer.passed else answer.failure

        return await self._updates.apply(request.update_id, ThreadVoice(cast, self._vote_timeout_s + 2 * SLACK_S))

    async def finish(self, request: worker_pb2.FinishUpdateRequest) -> None:
        self._check(request.leader_epoch)
        self._updates.finish(request.update_id)

    async def abort(self, request: worker_pb2.AbortUpdateRequest) -> None:
        self._check(request.leader_epoch)
        self._updates.abort(request.update_id)

    async def vote(self, request: worker_pb2.VoteUpdateRequest) -> worker_pb2.VoteUpdateResponse:
        raise self._not_leader()

    def _check(self, leader_epoch: str) -> None:
        if not leader_epoch:
            raise self._not_leader()

    def _not_leader(self) -> NotGroupLeader:
        return NotGroupLeader(
            f"rank {self._group.rank} of {self._group.group_id}: updates go to its leader",
            leader=self._group.leader_address,
        )


@dataclass
class GroupUpdate:
    """An update epoch of the whole group."""

    update_id: str
    holder: str
    version: PolicyVersion
    ranks: list[int] = field(default_factory=list)
    """Those that are behind and take part."""
    ballot: Ballot | None = None
    apply: asyncio.Task[Applied] | None = None


class Leader:
    """Rank 0."""

    def __init__(
        self,
        updates: WorkerUpdates,
        epoch: str,
        group: RankGroup,
        followers: Mapping[int, worker_pb2_grpc.WorkerServiceStub],
        vote_timeout_s: float,
    ) -> None:
        self._updates = updates
        self._epoch = epoch
        self._group = group
        self._followers = followers
        self._vote_timeout_s = vote_timeout_s
        self._update: GroupUpdate | None = None

    async def begin(self, request: worker_pb2.BeginUpdateRequest) -> int:
        update = self._update
        if update is not None and update.apply is not None and not update.apply.done():
            raise UpdateInProgress(
                f"{update.holder} updates this group to {update.version}",
                holder=update.holder,
                version=update.version,
                update_id=update.update_id,
            )
        asked = worker_pb2.BeginUpdateRequest()
        asked.CopyFrom(request)
        asked.worker_epoch, asked.leader_epoch = "", self._epoch
        calls: list[Awaitable[Any]] = [_begin_here(self._updates, request)]
        calls += [self._begin_at(rank, asked) for rank in self._followers]
        answers = dict(zip((0, *self._followers), await asyncio.gather(*calls, return_exceptions=True), strict=True))
        behind = [rank for rank, answer in answers.items() if not isinstance(answer, VersionNotNewer)]
        errors = [answer for answer in answers.values() if isinstance(answer, BaseException)]
        failed = next((error for error in errors if not isinstance(error, VersionNotNewer)), None)
        if failed is not None or not behind:
            await self._abort([rank for rank in behind if not isinstance(answers[rank], BaseException)], request)
            raise failed or errors[0]
        version = PolicyVersion.from_proto(request.version)
        failed_before = update is not None and update.apply is not None and update.apply.exception() is not None
        if update is None or update.update_id != request.update_id or failed_before:
            self._update = GroupUpdate(request.update_id, request.holder, version, behind)
        return sum(_fetched(answers[rank]) for rank in behind)

    async def apply(self, request: worker_pb2.ApplyUpdateRequest) -> Applied:
        update = self._find(request.update_id)
        if update.apply is None:
            # It goes on to its end even if its caller goes away.
            update.apply = asyncio.get_running_loop().create_task(self._apply(update))
            update.apply.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(update.apply)

    async def finish(self, request: worker_pb2.FinishUpdateRequest) -> None:
        update = self._find(request.update_id)
        if update.apply is None or not update.apply.done() or update.apply.exception() is not None:
            raise UpdateNotOpen("the update is not applied", update_id=request.update_id)
        asked = worker_pb2.FinishUpdateRequest()
        asked.CopyFrom(request)
        asked.leader_epoch = self._epoch
        if 0 in update.ranks:
            self._updates.finish(request.update_id)
        await asyncio.gather(
            *(
                _answer(self._followers[rank].FinishUpdate(asked, timeout=SHORT_TIMEOUT_S), rank)
                for rank in update.ranks
                if rank
            )
        )

    async def abort(self, request: worker_pb2.AbortUpdateRequest) -> None:
        update = self._update
        if update is not None and update.update_id == request.update_id and update.apply is None:
            self._update = None
            await self._abort(update.ranks, request)

    async def vote(self, request: worker_pb2.VoteUpdateRequest) -> worker_pb2.VoteUpdateResponse:
        update = self._update
        if update is None or update.update_id != request.update_id or request.leader_epoch != self._epoch:
            raise UpdateNotOpen("no such update is applied", update_id=request.update_id)
        failure = await self._cast(update, request.rank, request.stage, request.held_slices, request.failure)
        return worker_pb2.VoteUpdateResponse(passed=not failure, failure=failure)

    # --- Inside --------------------------------------------------------------------------------------

    async def _begin_at(self, rank: int, asked: worker_pb2.BeginUpdateRequest) -> worker_pb2.BeginUpdateResponse:
        stub = self._followers[rank]
        try:
            return await _answer(stub.BeginUpdate(asked, timeout=BEGIN_TIMEOUT_S), rank)
        except Unreachable:
            # A channel that failed tries again within a second: the rank may have come back meanwhile.
            await asyncio.sleep(RECONNECT_S)
            return await _answer(stub.BeginUpdate(asked, timeout=BEGIN_TIMEOUT_S), rank)

    async def _cast(self, update: GroupUpdate, rank: int, stage: str, held_slices: bytes, failure: str) -> str:
        if update.ballot is None:
            raise UpdateNotOpen("the update is not applied", update_id=update.update_id)
        if failure or stage == FAILED:
            update.ballot.veto(f"rank {rank}: {failure or 'it failed'}")
            return update.ballot.failure
        return await update.ballot.cast(stage, rank, held_slices)

    async def _apply(self, update: GroupUpdate) -> Applied:
        ballot = update.ballot = Ballot(update.update_id, set(update.ranks), self._vote_timeout_s)
        calls = {rank: asyncio.ensure_future(self._apply_at(rank, update)) for rank in update.ranks}
        pending: set[asyncio.Future[Applied]] = set(calls.values())
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for rank, call in calls.items():
                if call in done and (error := call.exception()) is not None:
                    ballot.veto(f"rank {rank}: {error}")
        errors = {rank: error for rank, call in calls.items() if (error := call.exception()) is not None}
        if not errors:
            return _together([call.result() for call in calls.values()])
        if len(errors) < len(calls) or any(isinstance(error, GroupSplit) for error in errors.values()):
            log.error("group_split", group=self._group.group_id, version=str(update.version), failed=sorted(errors))
            first = next(iter(errors.values()))
            raise GroupSplit(f"not all ranks have {update.version}: {first}", group=self._group.group_id) from first
        # The cause, not those who only heard of it.
        raise next((error for error in errors.values() if not isinstance(error, GroupVetoed)), errors[min(errors)])

    async def _apply_at(self, rank: int, update: GroupUpdate) -> Applied:
        if rank == 0:

            async def cast(stage: str, held_slices: bytes, failure: str) -> str:
                return await self._cast(update, 0, stage, held_slices, failure)

            voice = ThreadVoice(cast, self._vote_timeout_s + SLACK_S)
            return await self._updates.apply(update.update_id, voice)
        request = worker_pb2.ApplyUpdateRequest(update_id=update.update_id, leader_epoch=self._epoch)
        answer = await _answer(self._followers[rank].ApplyUpdate(request, timeout=APPLY_TIMEOUT_S), rank)
        report = UpdateReport(
            update.version, None, answer.pause_us / 1e6, answer.apply_us / 1e6, answer.in_flight_sample_count
        )
        return Applied(report, answer.verify_us / 1e6, answer.verified_slice_count, answer.probe_max_abs_error)

    async def _abort(self, ranks: Sequence[int], request: Any) -> None:
        """Drop an update that was not applied. A rank that does not hear of it drops it when its lease ends."""
        asked = worker_pb2.AbortUpdateRequest(update_id=request.update_id, leader_epoch=self._epoch)
        if 0 in ranks:
            self._updates.abort(request.update_id)
        await asyncio.gather(
            *(
                _answer(self._followers[rank].AbortUpdate(asked, timeout=SHORT_TIMEOUT_S), rank)
                for rank in ranks
                if rank
            ),
            return_exceptions=True,
        )

    def _find(self, update_id: str) -> GroupUpdate:
        if self._update is None or self._update.update_id != update_id:
            raise UpdateNotOpen("no such update is open; it may have expired", update_id=update_id)
        return self._update


class Peers:
    """The other ranks of a worker's group."""

    def __init__(self, group: RankGroup, stubs: Mapping[int, worker_pb2_grpc.WorkerServiceStub]) -> None:
        self.group = group
        self._stubs = stubs

    async def version(self) -> PolicyVersion:
        """What the ranks that serve have, so that one that comes back makes the group whole; else `UNSET`."""
        answers = await self._look_at_all()
        return max(
            (
                PolicyVersion.from_proto(answer.version)
                for answer in answers
                if answer is not None and answer.state == worker_pb2.WORKER_STATE_SERVING
            ),
            default=UNSET,
        )

    async def watch(self) -> None:
        """Return when another rank that was there is gone or was started again. For ranks that only step together."""
        epochs: dict[int, str] = {}
        silent: dict[int, int] = {}
        while max(silent.values(), default=0) < SILENT_LOOKS:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for rank, answer in zip(self._stubs, await self._look_at_all(), strict=True):
                if answer is not None and epochs.setdefault(rank, answer.epoch) != answer.epoch:
                    silent[rank] = SILENT_LOOKS
                elif rank in epochs:
                    silent[rank] = 0 if answer is not None else silent.get(rank, 0) + 1
        lost = [rank for rank, count in silent.items() if count >= SILENT_LOOKS]
        raise ServiceFailed(f"rank {lost[0]} of {self.group.group_id} has ended, and no rank steps without it")

    async def _look_at_all(self) -> list[worker_pb2.GetWorkerResponse | None]:
        return await asyncio.gather(*(self._look(stub) for stub in self._stubs.values()))

    async def _look(self, stub: worker_pb2_grpc.WorkerServiceStub) -> worker_pb2.GetWorkerResponse | None:
        try:
            return await stub.GetWorker(worker_pb2.GetWorkerRequest(), timeout=LOOK_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None


def join(
    group: RankGroup,
    addresses: Sequence[str],
    epoch: str,
    updates: WorkerUpdates,
    open_channel: Callable[[str], grpc.aio.Channel],
    vote_timeout_s: float,
) -> tuple[Leader | Follower, Peers]:
    """Take a rank's place in its group. `addresses` are those of all its ranks."""
    stubs = {
        rank: worker_pb2_grpc.WorkerServiceStub(open_channel(address))
        for rank, address in enumerate(addresses)
        if rank != group.rank
    }
    peers = Peers(group, stubs)
    if group.rank == 0:
        return Leader(updates, epoch, group, stubs, vote_timeout_s), peers
    return Follower(updates, group, stubs[0], vote_timeout_s), peers


async def _begin_here(updates: WorkerUpdates, request: worker_pb2.BeginUpdateRequest) -> int:
    version = PolicyVersion.from_proto(request.version)
    return await updates.begin(request.update_id, request.holder, version, request.lease_ttl_ms / 1000)


async def _answer(call: Any, rank: int = 0) -> Any:
    """A rank's answer; its refusal names the rank."""
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        error = from_rpc_error(failure)
        error.metadata.setdefault("rank", str(rank))
        raise error from failure


def _fetched(answer: Any) -> int:
    return answer if isinstance(answer, int) else answer.fetched_bytes


def _together(all_applied: Sequence[Applied]) -> Applied:
    """The slowest rank's times, and what all did together."""
    first = all_applied[0]
    report = UpdateReport(
        first.report.version,
        first.report.previous_version,
        max(applied.report.pause_s for applied in all_applied),
        max(applied.report.apply_s for applied in all_applied),
        sum(applied.report.in_flight_samples for applied in all_applied),
    )
    return Applied(
        report,
        max(applied.verify_s for applied in all_applied),
        max(applied.verified_slice_count for applied in all_applied),
        max(applied.probe_max_abs_error for applied in all_applied),
    )
