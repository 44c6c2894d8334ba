"""slipstream-gateway @ config.toml

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| http | requests of agents | a connection; a turn's pieces | agents; the session's runner |
"""

from __future__ import annotations

import asyncio

import structlog

from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.runtime import run_service, serve
from slipstream.gateway.bodies import BodyRoom
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.handlers import Handlers
from slipstream.gateway.http import HttpServer
from slipstream.gateway.turns import Turns

log = structlog.get_logger()


async def run(config: GatewayConfig) -> None:
    """Serve until SIGTERM."""
    access = Access.from_config(config)
    channels = Channels(lambda address: open_channel(address, access))
    orchestrator = open_channel(config.orchestrator_address, access)
    turns = Turns(orchestrator, channels, config.turn_timeout_s)
    bodies = BodyRoom(config.max_body_bytes, config.max_all_bodies_bytes)
    handlers = Handlers(turns, config.run_id, bodies, config.body_timeout_s, config.write_timeout_s)
    http = HttpServer(config, handlers)
    try:
        await http.start()
        log.info("http_started", host=config.http_host, port=http.port)
        try:
            await serve(config, [], {"http": asyncio.Event().wait})
        finally:
            await http.stop()
    finally:
        await channels.close()
        await orchestrator.close()


def main() -> None:
    run_service("gateway", GatewayConfig, run)


if __name__ == "__main__":
    main()
