"""slipstream-orchestrator: the sequencer of a run.

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| phases | the run from phase to phase | a version served, answers, trained steps | keeper, runners, trainer |
| watch | expired leases, reasons to give up | a timer | itself |
| published | versions from the broadcaster | a sealed version | the trainer, through the broadcaster |
| workers | what each worker serves | a timer | itself |
| update | workers that are behind | a new version, a worker's change | `published`, `workers` |
| salts | versions without groups | the end of a group, a timer | runners' reports |
| mirror | versions, leases, dispatch versions, into Redis | a change, at most a second | everything that changes them |
| disk | free bytes, records that wait for room | a timer | itself |
| release | keys of rows nobody needs | a timer | itself |
"""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.api.rollout.v1 import rollout_pb2_grpc, runner_pb2_grpc
from slipstream.api.run.v1 import run_pb2_grpc
from slipstream.api.training.v1 import batch_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.config import ConfigError
from slipstream.common.errors import DiskFull, JournalCorrupt
from slipstream.common.runtime import Loop, Servicers, leave, run_service, serve
from slipstream.common.state import State
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator import telemetry
from slipstream.orchestrator.checkpoint_calls import CheckpointCalls
from slipstream.orchestrator.config import OrchestratorConfig
from slipstream.orchestrator.disk_watch import DiskWatch
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.keeper import VersionKeeper, open_workers
from slipstream.orchestrator.leases import RunnerLeases
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.public_servicer import RolloutServicer, RunServicer
from slipstream.orchestrator.redis_mirror import RedisMirror
from slipstream.orchestrator.releaser import RowsReleaser
from slipstream.orchestrator.resume import earlier_history, take_up
from slipstream.orchestrator.run_state import RunState
from slipstream.orchestrator.sequencer import Sequencer, task_sequence
from slipstream.orchestrator.servicer import BatchServicer, RunnerServicer
from slipstream.orchestrator.session_desk import SessionDesk
from slipstream.orchestrator.session_keys import SessionKeys
from slipstream.orchestrator.summary import Summarizer
from slipstream.orchestrator.supervisor import Supervisor
from slipstream.orchestrator.tracking.feed import TrackerFeed
from slipstream.orchestrator.tracking.trackers import TrackedRun

log = structlog.get_logger()


class Orchestrator:
    """All parts of the orchestrator, wired. Must be made where an event loop runs."""

    def __init__(self, config: OrchestratorConfig) -> None:
        access = Access.from_config(config)
        self._channels: list[grpc.aio.Channel] = []

        def channel(address: str) -> grpc.aio.Channel:
            self._channels.append(open_channel(address, access))
            return self._channels[-1]

        keys = SessionKeys(config.run_dir / "session-secret") if config.gateway_url else None
        self.trackers = TrackerFeed(config.tracking, TrackedRun(config.run_id, config.run_dir))
        self.metrics = MetricsFile(
            config.run_dir / "metrics.jsonl", time.time, config.metrics_limit_bytes, self.trackers.take
        )
        self.journal = Journal(config.run_dir / "journal" / "journal.jsonl", config.journal_limit_bytes)
        history = earlier_history(self.journal, config)
        self.journal.summarizer = Summarizer(task_sequence(config).environment_of, history)
        if self.journal.recovered.cut_bytes:
            log.warning("journal_tail_cut", path=str(self.journal.path), cut_bytes=self.journal.recovered.cut_bytes)
        masked = any(environment.age_out == "mask" for environment in config.environments)
        self.journal.append(
            "resumed" if history else "run",
            run_id=config.run_id,
            seed=config.seed,
            total_steps=config.total_steps,
            max_off_policy_steps=None if masked else config.max_off_policy_steps,
        )
        self.state = RunState(config.run_id, config.total_steps, self.metrics)
        self.checkpoints = CheckpointCalls(self.state)
        self.leases = RunnerLeases(config.runner_lease_ttl_s, time.monotonic)
        self.releaser = RowsReleaser(channel)
        self.sequencer = Sequencer(
            config,
            state=self.state,
            journal=self.journal,
            metrics=self.metrics,
            leases=self.leases,
            release_rows=self.releaser.release,
        )
        self.journal.frontier = self.sequencer.frontier
        if history is not None:
            take_up(history, self.sequencer, self.state, self.metrics)
        self.disk = DiskWatch(
            config.disk,
            config.run_dir,
            self.state,
            self.leases,
            [self.journal, self.metrics],
            self.sequencer.room_made,
        )
        self.keeper = VersionKeeper(
            config.run_id,
            config.keeper,
            open_workers(config.workers, channel),
            broadcast_pb2_grpc.BroadcastServiceStub(channel(config.broadcaster)),
            on_published=self._published,
            on_serving=self.sequencer.serving_advanced,
            until_cancelled=self.leases.until_acknowledged,
            metrics=self.metrics,
            running_versions=self.sequencer.running_versions,
            groups_changed=self.sequencer.admission_changed,
        )
        self.state.workers = self.keeper.worker_versions
        self.supervisor = Supervisor(
            config,
            state=self.state,
            sequencer=self.sequencer,
            keeper=self.keeper,
            metrics=self.metrics,
            journal=self.journal,
            history=history,
        )
        channels = Channels(lambda address: open_channel(address, access))
        self.desk = SessionDesk(self.state, self.sequencer, channels, keys)
        telemetry.observe(self.state, self.sequencer, self.leases, self.journal)
        self.redis = State(config.redis.url, config.run_id)
        self.mirror = RedisMirror(
            self.redis,
            self.state,
            self.leases,
            self.sequencer.mirror_due,
            self.sequencer.dispatch_versions,
            self.sequencer.admission_may_have_opened,
        )

    @property
    def servicers(self) -> Servicers:
        """What the server serves."""
        return [
            (
                runner_pb2_grpc.add_RunnerServiceServicer_to_server,
                RunnerServicer(self.sequencer, self.state, self.journal),
                "slipstream.api.rollout.v1.RunnerService",
            ),
            (
                rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
                RolloutServicer(self.state, self.sequencer, self.desk, self.journal),
                "slipstream.api.rollout.v1.RolloutService",
            ),
            (
                batch_pb2_grpc.add_BatchServiceServicer_to_server,
                BatchServicer(self.sequencer, self.state, self.journal, self.checkpoints),
                "slipstream.api.training.v1.BatchService",
            ),
            (
                run_pb2_grpc.add_RunServiceServicer_to_server,
                RunServicer(self.state, self.sequencer, self.checkpoints, self.journal, self.supervisor.end),
                "slipstream.api.run.v1.RunService",
            ),
        ]

    @property
    def loops(self) -> dict[str, Loop]:
        """What runs for the life of the process; see the table above."""
        return {
            "phases": self.supervisor.run,
            "watch": self.supervisor.watch,
            "published": self.keeper.watch_published,
            "workers": self.keeper.poll_workers,
            "update": self.keeper.update,
            "salts": self.keeper.end_salts,
            "mirror": self.mirror.run,
            "disk": self.disk.run,
            "release": self.releaser.run,
        }

    async def drain(self) -> None:
        """Put the journal on disk, let go of what is not needed, and give trackers their time."""
        await self.releaser.flush()
        try:
            await self.journal.sync()
        except DiskFull as error:
            log.error("journal_not_synced", detail=error.message)
        await asyncio.to_thread(self.trackers.finish)

    async def close(self) -> None:
        """Close files and channels."""
        for channel in self._channels:
            await channel.close()
        await self.desk.close_channels()
        await self.redis.close()
        self.journal.close()
        self.metrics.close()
        await asyncio.to_thread(self.trackers.finish)

    def _published(self, version: PolicyVersion) -> None:
        self.state.published = version
        self.sequencer.mirror_due.set()
        self.state.changed.notify()


async def run(config: OrchestratorConfig) -> None:
    """Serve until SIGTERM."""
    try:
        orchestrator = Orchestrator(config)
    except JournalCorrupt as error:
        raise ConfigError(str(error)) from error
    try:
        await serve(config, orchestrator.servicers, orchestrator.loops, on_drain=orchestrator.drain)
    finally:
        await orchestrator.close()


def main() -> None:
    """Entry point of `slipstream-orchestrator`."""
    try:
        run_service("orchestrator", OrchestratorConfig, run)
    except SystemExit as end:
        leave(end.code)  # the libraries of trackers may wait at exit, however long
    leave()


if __name__ == "__main__":
    main()
