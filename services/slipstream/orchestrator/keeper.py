"""The version keeper: brings every published version to every worker, and says which version is served.

Loops: `watch_published` follows the broadcaster, `poll_workers` looks at the workers, `update` closes the gap between
the two, `end_salts` tells workers which versions lost their last group. The decode pool is updated before the prefill
pool, so that KV is never newer than what samples on it. `serving` is the lowest version among the routable workers of
all pools, and only moves forward. A data-parallel group is updated through its leader, and none of its ranks is
routable unless all are, at one version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import structlog

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.api.run.v1 import run_pb2
from slipstream.common.errors import SlipstreamError, Unreachable, VersionNotNewer, from_rpc_error
from slipstream.common.rank_groups import RankGroup, by_group, in_whole_groups
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.orchestrator.config import KeeperConfig, WorkerConfig
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.signals import Signal

log = structlog.get_logger()

_LEASE_TTL_MS = 60_000
_MAX_BACKOFF_S = 10.0
_CANNOT_BE_UPDATED = (worker_pb2.WORKER_STATE_DRAINING, worker_pb2.WORKER_STATE_SILENT)
_STATE_NAMES = {
    worker_pb2.WORKER_STATE_SERVING: "serving",
    worker_pb2.WORKER_STATE_STALE: "stale",
    worker_pb2.WORKER_STATE_SILENT: "silent",
}


@dataclass(slots=True)
class Worker:
    """A worker as last seen."""

    replica: str
    role: str
    stub: worker_pb2_grpc.WorkerServiceStub
    epoch: str = ""
    state: worker_pb2.WorkerState = worker_pb2.WORKER_STATE_UNSPECIFIED
    version: PolicyVersion = UNSET
    seen_at: float = float("-inf")
    updating: bool = False
    stale_reason: str = ""
    """Its own sentence on why it is stale."""
    failures: int = 0
    retry_at: float = float("-inf")
    live: tuple[str, set[PolicyVersion]] = ("", set())
    """The epoch that was told, and the versions whose salts it keeps: those groups run at or are dispatched at."""
    group: RankGroup | None = None
    load: worker_pb2.Load = field(default_factory=worker_pb2.Load)
    """As it was last reported."""
    slot_count: int = 0
    """Samples that it runs at once, at most."""

    def see(self, epoch: str, state: worker_pb2.WorkerState, version: PolicyVersion, now: float) -> bool:
        """Take in what the worker says; True when something changed."""
        changed = (epoch, state, version) != (self.epoch, self.state, self.version)
        if epoch != self.epoch:
            self.failures, self.retry_at = 0, float("-inf")
        self.epoch, self.state, self.version, self.seen_at = epoch, state, version, now
        return changed


@dataclass(slots=True)
class VersionKeeper:
    """Owns the updates of all workers of a run."""

    run_id: str
    config: KeeperConfig
    workers: list[Worker]
    broadcaster: broadcast_pb2_grpc.BroadcastServiceStub
    on_published: Callable[[PolicyVersion], None]
    on_serving: Callable[[PolicyVersion], None]
    until_cancelled: Callable[[float], Awaitable[bool]]
    """Waits until the engines have dropped what was cancelled, or for so many seconds."""
    metrics: MetricsFile
    running_versions: Callable[[], set[PolicyVersion]]
    """Dispatch versions of the groups that run."""
    clock: Callable[[], float] = time.monotonic
    published: PolicyVersion = UNSET
    serving: PolicyVersion = UNSET
    groups_changed: Signal = field(default_factory=Signal)
    """Notified when groups ended."""
    applied: int = 0
    changed: Signal = field(default_factory=Signal)
    _update_ids: count[int] = field(default_factory=count)

    # ---- loops

    async def watch_published(self) -> None:
        """Follow the broadcaster for ever; a broken stream is opened again."""
        while True:
            try:
                request = broadcast_pb2.WatchVersionsRequest(
                    after=self.published.to_proto() if self.published else None
                )
                async for message in self.broadcaster.WatchVersions(request, timeout=3600.0):
                    self._see_published(PolicyVersion.from_proto(message.version))
            except grpc.aio.AioRpcError as error:
                log.debug("broadcaster_stream_ended", reason=from_rpc_error(error).reason)
            await asyncio.sleep(0.5)

    async def poll_workers(self) -> None:
        """Look at every worker for ever."""
        while True:
            await self.poll()
            await asyncio.sleep(self.config.poll_interval_s)

    async def update(self) -> None:
        """Update whatever is behind, for ever."""
        while True:
            behind = self.behind()
            if behind:
                await self.roll(behind, self.published)
            else:
                await self.changed.wait(self.config.poll_interval_s)

    async def end_salts(self) -> None:
        """Tell each worker of the end of a version's last group, for ever."""
        while True:
            await self.tell_salts()
            await self.groups_changed.wait(self.config.poll_interval_s)

    # ---- looking

    async def poll(self) -> None:
        """Ask every worker once what it serves."""
        results = await asyncio.gather(*(self._look(worker) for worker in self.workers))
        self._advance()
        if any(results):
            self.changed.notify()

    @property
    def roles(self) -> list[str]:
        """The pools there are, in the order in which they are updated; a run may do without a prefill pool."""
        return sorted({worker.role for worker in self.workers})

    def routable(self, role: str) -> list[Worker]:
        """Return the workers of a pool that take requests."""
        pool = [worker for worker in self.workers if worker.role == role]
        return [worker for worker in in_whole_groups(pool, self._serves) if worker.version]

    def behind(self) -> list[Worker]:
        """Return what can be reached and does not serve the newest published version; of a group the leader."""
        alone = [worker for worker in self.workers if worker.group is None and self._is_behind([worker])]
        return alone + [ranks[0] for ranks in by_group(self.workers).values() if self._is_behind(ranks)]

    def _is_behind(self, ranks: Sequence[Worker]) -> bool:
        """Whether a worker, or a group of which all ranks are there, has to be updated and can be."""
        group = ranks[0].group
        if group is not None and (group.rank != 0 or len(ranks) != group.size):
            return False  # ranks that were never seen
        can = ranks[0].retry_at <= self.clock() and all(
            self._reachable(rank) and rank.state not in _CANNOT_BE_UPDATED for rank in ranks
        )
        return can and any(
            rank.version < self.published or (rank.state == worker_pb2.WORKER_STATE_STALE and bool(self.published))
            for rank in ranks
        )

    def _ranks(self, worker: Worker) -> list[Worker]:
        """The worker, or all ranks of its group."""
        return [worker] if worker.group is None else by_group(self.workers)[worker.group.group_id]

    def worker_versions(self) -> list[run_pb2.WorkerVersion]:
        """Return the workers as the run's state shows them."""
        return [
            run_pb2.WorkerVersion(
                replica=worker.replica,
                version=worker.version.to_proto() if worker.version else None,
                state=self._state_name(worker),
            )
            for worker in self.workers
        ]

    async def tell_salts(self) -> None:
        """Tell the workers that do not know it yet which versions groups run at or are dispatched at."""
        live = self.running_versions() | {self.serving}
        if self.serving:
            untold = [worker for worker in self.workers if worker.live != (worker.epoch, live)]
            await asyncio.gather(*(self._end_salts(worker, live) for worker in untold if self._serves(worker)))

    async def _end_salts(self, worker: Worker, live: set[PolicyVersion]) -> None:
        request = worker_pb2.EndSaltsRequest(
            worker_epoch=worker.epoch,
            running_versions=[version.to_proto() for version in sorted(live)],
            dispatch_version=self.serving.to_proto(),
        )
        told = (worker.epoch, live)
        try:
            await self._answered(worker, worker.stub.EndSalts(request, timeout=self.config.away_after_s))
        except SlipstreamError as error:  # told again at the next turn; until then its cache holds what nobody hits
            log.debug("salts_not_told", worker=worker.replica, reason=error.reason)
            return
        worker.live = told

    # ---- updating

    async def roll(self, workers: Sequence[Worker], version: PolicyVersion) -> None:
        """Bring `workers` to `version`: all fetch at once, then one after the other swaps, decode first."""
        begun = await asyncio.gather(*(self._begin(worker, version) for worker in workers))
        ready = [(worker, update_id) for worker, update_id in zip(workers, begun, strict=True) if update_id]
        self._advance()
        if not ready:
            return
        await self.until_cancelled(self.config.cancel_ack_timeout_s)
        for role in self.roles:
            for worker, update_id in ready:
                if worker.role != role:
                    continue
                if role == "prefill" and any(decode.version < version for decode in self.routable("decode")):
                    await self._abort(worker, update_id)
                    continue
                await self._apply(worker, update_id, version)
                self._advance()

    async def _begin(self, worker: Worker, version: PolicyVersion) -> str | None:
        update_id = f"{self.run_id}/{version}/{worker.replica}/{next(self._update_ids)}"
        request = worker_pb2.BeginUpdateRequest(
            update_id=update_id,
            holder="orchestrator",
            version=version.to_proto(),
            lease_ttl_ms=_LEASE_TTL_MS,
            worker_epoch=worker.epoch,
        )
        try:
            await self._answered(worker, worker.stub.BeginUpdate(request, timeout=self.config.begin_timeout_s))
        except SlipstreamError as error:
            await self._failed(worker, "begin", version, error)
            return None
        return update_id

    async def _apply(self, worker: Worker, update_id: str, version: PolicyVersion) -> None:
        started = self.clock()
        worker.updating = True
        try:
            apply = worker_pb2.ApplyUpdateRequest(update_id=update_id)
            timeout_s = self.config.apply_timeout_s
            applied = await self._answered(worker, worker.stub.ApplyUpdate(apply, timeout=timeout_s))
            finish = worker_pb2.FinishUpdateRequest(update_id=update_id)
            finished = await self._answered(worker, worker.stub.FinishUpdate(finish, timeout=timeout_s))
        except SlipstreamError as error:
            await self._failed(worker, "apply", version, error)
            return
        finally:
            worker.updating = False
        worker.see(worker.epoch, finished.state, PolicyVersion.from_proto(finished.version), self.clock())
        await asyncio.gather(*(self._look(rank) for rank in self._ranks(worker) if rank is not worker))
        worker.failures = 0
        self.applied += 1
        figures = {
            "pause_s": applied.pause_us / 1e6,
            "apply_s": applied.apply_us / 1e6,
            "verify_s": applied.verify_us / 1e6,
            "total_s": round(self.clock() - started, 6),
            "in_flight_samples": applied.in_flight_sample_count,
            "probe_max_abs_error": applied.probe_max_abs_error,
        }
        self.metrics.write("update", version=str(version), replica=worker.replica, **figures)
        log.info("weights_applied", policy_version=str(version), worker=worker.replica, **figures)

    async def _abort(self, worker: Worker, update_id: str) -> None:
        log.info("update_postponed", worker=worker.replica, reason="a decode worker is behind")
        self._back_off(worker)
        try:
            await worker.stub.AbortUpdate(worker_pb2.AbortUpdateRequest(update_id=update_id), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            log.debug("abort_failed", worker=worker.replica, reason=from_rpc_error(error).reason)

    async def _failed(self, worker: Worker, stage: str, version: PolicyVersion, error: SlipstreamError) -> None:
        if isinstance(error, VersionNotNewer):
            # It refitted itself meanwhile: no failure. The pause keeps a worker that contradicts itself from spinning.
            log.debug("update_not_needed", worker=worker.replica, policy_version=str(version))
            await self._look_at_all(worker)
            if worker.version < version:
                worker.retry_at = self.clock() + self.config.refit_backoff_s
            return
        self._back_off(worker)
        log.warning(
            "update_failed",
            worker=worker.replica,
            stage=stage,
            policy_version=str(version),
            reason=error.reason,
            detail=error.message,
            failures=worker.failures,
        )
        self.metrics.write(
            "update_failed", version=str(version), replica=worker.replica, stage=stage, reason=error.reason
        )
        await self._look_at_all(worker)

    def _back_off(self, worker: Worker) -> None:
        worker.failures += 1
        worker.retry_at = self.clock() + min(self.config.refit_backoff_s * 2 ** (worker.failures - 1), _MAX_BACKOFF_S)

    # ---- inside

    def _see_published(self, version: PolicyVersion) -> None:
        # What a restored trainer publishes of steps that were published before is not gone back to.
        if version > self.published and version.step >= self.published.step:
            self.published = version
            self.on_published(version)
            self.changed.notify()

    async def _look_at_all(self, worker: Worker) -> None:
        await asyncio.gather(*(self._look(rank) for rank in self._ranks(worker)))

    async def _look(self, worker: Worker) -> bool:
        try:
            answer = await worker.stub.GetWorker(
                worker_pb2.GetWorkerRequest(), timeout=max(1.0, self.config.away_after_s / 2)
            )
        except grpc.aio.AioRpcError:
            return False
        version = PolicyVersion.from_proto(answer.version)
        worker.stale_reason, worker.group = answer.stale_reason, RankGroup.of(answer)
        worker.load, worker.slot_count = answer.load, answer.limits.max_running_samples
        if worker.state != answer.state and answer.state == worker_pb2.WORKER_STATE_STALE:
            log.warning("worker_stale", worker=worker.replica, reason=answer.stale_reason)
        return worker.see(answer.epoch, answer.state, version, self.clock())

    def _advance(self) -> None:
        pools = [self.routable(role) for role in self.roles]
        if not all(pools):
            return
        lowest = min(worker.version for pool in pools for worker in pool)
        if lowest > self.serving:
            self.serving = lowest
            self.on_serving(lowest)

    async def _answered(self, worker: Worker, call: Any) -> Any:
        """A worker's answer. One that is away meanwhile is not waited for: the others wait for it to be updated."""
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=self.config.poll_interval_s)
                if not answer.done() and not self._reachable(worker):
                    raise Unreachable(f"{worker.replica} is away", replica=worker.replica)
            return answer.result()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            answer.cancel()

    def _reachable(self, worker: Worker) -> bool:
        return self.clock() - worker.seen_at <= self.config.away_after_s

    def _serves(self, worker: Worker) -> bool:
        return worker.state == worker_pb2.WORKER_STATE_SERVING and self._reachable(worker)

    def _state_name(self, worker: Worker) -> str:
        if not self._reachable(worker):
            return "away"
        if worker.updating:
            return "updating"
        return _STATE_NAMES.get(worker.state, "away")


def open_workers(configs: Sequence[WorkerConfig], open_channel: Callable[[str], grpc.aio.Channel]) -> list[Worker]:
    """Return the workers of a config, each with a channel of its own."""
    return [
        Worker(config.replica, config.role, worker_pb2_grpc.WorkerServiceStub(open_channel(config.address)))
        for config in configs
    ]
