"""slipstream-sandbox @ config.toml

| loop | takes | waits for | who unblocks it |
|---|---|---|---|
| sweep | sandboxes past their lease | a timer | itself |
| each place (a thread) | programs, one at a time | its queue; a program, to its limits | an Exec; the kernel |
"""

from __future__ import annotations

from slipstream.api.sandbox.v1 import sandbox_pb2_grpc
from slipstream.common.runtime import run_service, serve
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.executor import open_executor

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
    run_service("sandbox", SandboxConfig, run)


if __name__ == "__main__":
    main()
