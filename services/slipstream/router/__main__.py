"""slipstream-router @ config.toml"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.routing.v1 import routing_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.runtime import Loop, run_service, serve
from slipstream.common.state import State
from slipstream.router import telemetry
from slipstream.router.config import RouterConfig
from slipstream.router.leases import PlacementLeases
from slipstream.router.mirror import LeaseMirror
from slipstream.router.placement import PlacementPolicy
from slipstream.router.pool import PrefixIndex, Worker, WorkerPool
from slipstream.router.servicer import RouterServicer
from slipstream.router.watch import PoolWatcher

EXPIRE_PERIOD_S = 1.0


async def expire_loop(leases: PlacementLeases, mirror: LeaseMirror) -> None:
    """End leases whose time is over. Waits on its clock alone."""
    while True:
        expired = leases.expire(time.monotonic())
        telemetry.leases_expired.inc(len(expired))
        mirror.released(expired)
        await asyncio.sleep(EXPIRE_PERIOD_S)


async def run(config: RouterConfig) -> None:
    access = Access.from_config(config)
    pool = WorkerPool(
        [
            Worker(endpoint.replica, endpoint.address, role, PrefixIndex(config.prefix_index_blocks))
            for role, endpoints in (
                (worker_pb2.WORKER_ROLE_PREFILL, config.prefill_workers),
                (worker_pb2.WORKER_ROLE_DECODE, config.decode_workers),
            )
            for endpoint in endpoints
        ]
    )
    policy = PlacementPolicy(
        config.worker_silence_s,
        config.saturation_fraction,
        config.affinity_slack_samples,
        config.remote_prefill_min_uncached_tokens,
    )
    leases = PlacementLeases(config.lease_ttl_s, config.max_placements)
    state = State(config.redis.url, config.run_id)
    mirror = LeaseMirror(state, leases)
    watcher = PoolWatcher(config.worker_silence_s)
    channels = {worker.replica: open_channel(worker.address, access) for worker in pool}
    loops: dict[str, Loop] = {
        f"follow {worker.replica}": partial(watcher.follow, worker, channels[worker.replica]) for worker in pool
    }
    loops |= {"expire": partial(expire_loop, leases, mirror), "mirror": mirror.run}
    telemetry.observe(pool, leases, config.worker_silence_s)
    servicer = RouterServicer(pool, policy, leases, mirror, watcher)
    try:
        await serve(
            config,
            [
                (
                    routing_pb2_grpc.add_RouterServiceServicer_to_server,
                    servicer,
                    "slipstream.api.routing.v1.RouterService",
                )
            ],
            loops,
        )
    finally:
        for channel in channels.values():
            await channel.close()
        await state.close()


def main() -> None:
    run_service("router", RouterConfig, run)


if __name__ == "__main__":
    main()
