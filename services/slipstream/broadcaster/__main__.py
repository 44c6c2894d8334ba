"""slipstream-broadcaster @ config.toml"""

from __future__ import annotations

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.broadcaster import telemetry
from slipstream.broadcaster.config import BroadcasterConfig
from slipstream.broadcaster.publications import Publications
from slipstream.broadcaster.servicer import BroadcastServicer
from slipstream.broadcaster.store import VersionStore
from slipstream.common.runtime import run_service, serve
from slipstream.common.state import State


async def run(config: BroadcasterConfig) -> None:
    """Serve until SIGTERM."""
    store = VersionStore(config.run_dir / "versions", config.max_store_bytes)
    telemetry.observe(store, config.max_store_bytes)
    state = State(config.redis.url, config.run_id)
    publications = Publications(store, state, config.keep_version_count, config.prune_interval_s)
    servicer = BroadcastServicer(store, publications)
    add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
    try:
        await serve(
            config,
            [(add, servicer, "slipstream.api.broadcast.v1.BroadcastService")],
            {"mirror": publications.mirror, "prune": publications.prune_for_ever},
        )
    finally:
        await state.close()


def main() -> None:
    run_service("broadcaster", BroadcasterConfig, run)


if __name__ == "__main__":
    main()
