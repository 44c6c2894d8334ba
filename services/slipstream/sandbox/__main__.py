"""slipstream-sandbox @ config.toml

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| sweep | sandboxes past their lease | a timer | itself |
| each place (a thread) | programs, one at a time | its queue; a program, to its limits | an Exec; the kernel |
"""

from __future__ import annotations

import asyncio
import sys

import structlog

from slipstream.api.sandbox.v1 import sandbox_pb2_grpc
from slipstream.common.config import cli
from slipstream.common.errors import SandboxBroken
from slipstream.common.runtime import serve
from slipstream.common.telemetry import setup_logging
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.executor import open_executor

log = structlog.get_logger()

SERVICE = "slipstream.api.sandbox.v1.SandboxService"
DRAIN_PATIENCE = 0.7  # of the drain timeout; the rest is for killing and answering


async def run(config: SandboxConfig) -> None:
    """Serve until SIGTERM."""
    with open_executor(config) as executor:
        await serve(
            config,
            [(sandbox_pb2_grpc.add_SandboxServiceServicer_to_server, executor.servicer, SERVICE)],
            {"sweep": executor.table.sweep},
            on_drain=lambda: executor.pool.drain(config.drain_timeout_s * DRAIN_PATIENCE),
        )


def main() -> None:
    config = cli(SandboxConfig)
    setup_logging(config, "sandbox")
    try:
        asyncio.run(run(config))
    except SandboxBroken as error:
        log.error("sandbox_broken", detail=error.message)
        print(f"slipstream-sandbox: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
