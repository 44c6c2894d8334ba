"""slipstream-runner @ config.toml"""

from __future__ import annotations

import sys

from slipstream.api.rollout.v1 import rows_pb2_grpc, session_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.config import ConfigError
from slipstream.common.runtime import run_service, serve
from slipstream.runner import telemetry
from slipstream.runner.config import RunnerConfig
from slipstream.runner.envclient import EnvironmentWorker
from slipstream.runner.envpool import EnvironmentPool
from slipstream.runner.epoch import alone, next_epoch
from slipstream.runner.groups import GroupRunner
from slipstream.runner.loops import RunnerLoops
from slipstream.runner.peers import Peers
from slipstream.runner.records import Recorder
from slipstream.runner.rollout_log import RolloutLog
from slipstream.runner.servicer import RowsServicer
from slipstream.runner.session_servicer import SessionServicer
from slipstream.runner.sessions import SessionRunner
from slipstream.runner.spool import Spool
from slipstream.runner.teacher import TeacherClient
from slipstream.runner.turns import TurnClient
from slipstream.runner.watch import WorkerWatch


async def run(config: RunnerConfig, arguments: list[str]) -> None:
    """Serve until SIGTERM. `arguments` are our own, for the process that runs environments."""
    if not config.listen.port:
        raise ConfigError("listen.port is required: others fetch rows from this address")
    runner_id = config.replica or "runner"
    with alone(config.run_dir, runner_id):
        await _run(config, arguments, runner_id)


async def _run(config: RunnerConfig, arguments: list[str], runner_id: str) -> None:
    epoch = next_epoch(config.run_dir / f"{runner_id}.epoch")
    address = config.listen.address(config.listen.port)
    spool = Spool(config.run_dir / "spool" / runner_id, config.spool_limit_bytes, epoch)
    rollout_log = RolloutLog(
        config.run_dir / "rollouts",
        runner_id,
        config.rollout_log_limit_bytes,
        config.rollout_buffer_bytes,
    )
    peers = Peers(config.orchestrator_address, config.router_address, Access.from_config(config), runner_id, epoch)
    environments = EnvironmentPool(arguments, config.environment_timeout_s, config.environments)
    watch = WorkerWatch(peers.router)
    turns = TurnClient(peers, watch, config.block_size_tokens, config.prefill_timeout_s)
    teacher = TeacherClient(peers, [each.address for each in config.teacher_workers], config.teacher_timeout_s)
    groups = GroupRunner(environments, turns, spool, address, epoch, rollout_log.write, teacher)
    sessions = SessionRunner(
        EnvironmentWorker(arguments, config.environment_timeout_s, []),
        turns,
        spool,
        Recorder(address, epoch),
        rollout_log.write,
        address,
        config.sessions,
        teacher,
    )
    loops = RunnerLoops(
        runner_id,
        epoch,
        peers,
        environments,
        groups,
        sessions,
        spool,
        rollout_log,
        config.max_running_groups,
        config.report_period_s,
    )
    telemetry.observe(lambda: loops.running_count, config.max_running_groups, spool, rollout_log)
    package = "slipstream.api.rollout.v1"
    try:
        await serve(
            config,
            [
                (rows_pb2_grpc.add_RowsServiceServicer_to_server, RowsServicer(spool), f"{package}.RowsService"),
                (
                    session_pb2_grpc.add_SessionServiceServicer_to_server,
                    SessionServicer(sessions),
                    f"{package}.SessionService",
                ),
            ],
            {
                "environments": environments.run,
                "texts": sessions.texts_loop,
                "acquire": loops.acquire_loop,
                "heartbeat": loops.heartbeat_loop,
                "report": loops.report_loop,
                "taking_up": loops.taking_up.run,
                "spool": spool.sweep_loop,
                "give_back": peers.give_back_loop,
                "workers": watch.follow,
                "rollouts": rollout_log.flush_loop,
            },
            on_drain=loops.drain,
        )
    finally:
        await peers.close()
        rollout_log.close()
        spool.close()


def main() -> None:
    run_service("runner", RunnerConfig, lambda config: run(config, sys.argv[1:]))


if __name__ == "__main__":
    main()
