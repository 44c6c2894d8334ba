"""The orchestrator's version keeper over a cluster's workers, and the groups that it counts as running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.config import KeeperConfig, WorkerConfig
from slipstream.orchestrator.keeper import VersionKeeper, open_workers
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.signals import Signal

CONFIG = KeeperConfig(
    poll_interval_s=0.05, away_after_s=2.0, begin_timeout_s=5.0, apply_timeout_s=5.0, refit_backoff_s=0.1
)
PATIENT = CONFIG.model_copy(update={"away_after_s": 20.0, "begin_timeout_s": 30.0, "apply_timeout_s": 30.0})
"""For bodies in which no worker is to be left out, however busy the machine is."""


class Keeping:
    """A keeper at work."""

    def __init__(self, cluster: Any, channels: Channels, run_id: str, config: KeeperConfig) -> None:
        self.cluster = cluster
        self.running: dict[str, PolicyVersion] = {}
        """Dispatch version of each group that runs."""
        self.groups_ended = Signal()
        workers = [
            WorkerConfig(
                replica=member.worker.identity.replica,
                role="prefill" if member.worker.identity.replica.startswith("prefill") else "decode",
                address=member.address,
            )
            for member in cluster.members
        ]
        self.metrics = MetricsFile(cluster.run_dir / f"{run_id}.jsonl", time.time)
        self.keeper = VersionKeeper(
            run_id,
            config,
            open_workers(workers, channels.get),
            broadcast_pb2_grpc.BroadcastServiceStub(cluster.channel),
            on_published=lambda version: None,
            on_serving=self._served,
            until_cancelled=self._nothing_cancelled,
            metrics=self.metrics,
            running_versions=lambda: set(self.running.values()),
            groups_changed=self.groups_ended,
        )

    @property
    def serving(self) -> PolicyVersion:
        return self.keeper.serving

    async def until_serving(self, version: PolicyVersion, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.serving < version:  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.005)

    async def group(self, group_id: str, turn: Callable[[PolicyVersion], Coroutine[Any, Any, Any]]) -> Any:
        """Run a group's turn at the version that groups are dispatched at now."""
        version = self.running[group_id] = self.serving
        try:
            return await turn(version)
        finally:
            del self.running[group_id]
            self.groups_ended.notify()

    def _served(self, version: PolicyVersion) -> None:
        self.cluster.state.versions["serving"] = version

    async def _nothing_cancelled(self, timeout_s: float) -> bool:
        return True


@asynccontextmanager
async def keeping(cluster: Any, run_id: str = "run", config: KeeperConfig = CONFIG) -> AsyncIterator[Keeping]:
    """`async with keeping(cluster) as kept`: brings what is published to all workers the cluster has now."""
    channels = Channels(lambda address: open_channel(address, Access()))
    kept = Keeping(cluster, channels, run_id, config)
    loops = (kept.keeper.watch_published, kept.keeper.poll_workers, kept.keeper.update, kept.keeper.end_salts)
    tasks = [asyncio.create_task(loop()) for loop in loops]
    try:
        yield kept
        assert not [task for task in tasks if task.done()], "a loop of the keeper ended"
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await channels.close()
        kept.metrics.close()
