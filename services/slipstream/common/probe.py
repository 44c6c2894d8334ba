"""Whether a service answers, as a container's health check asks: exit code 0 or 1.

    python -m slipstream.common.probe @ router.toml

Any answer of the health protocol counts: a worker says NOT_SERVING until its first weights, and is well all the same.
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ConfigError, ServiceConfig, host_port, parse_arguments

TIMEOUT_S = 5.0
SECTIONS = ("listen", "auth", "tls")
ANYWHERE = ("", "0.0.0.0", "::", "[::]")


async def answers(config: ServiceConfig) -> bool:
    """Whether the service of `config`, on this machine, answers in time."""
    host = "127.0.0.1" if config.listen.host in ANYWHERE else config.listen.host
    async with open_channel(host_port(host, config.listen.port), Access.from_config(config)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # pyright: ignore[reportArgumentType]
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return False
    return True


def main() -> None:
    try:
        [file] = parse_arguments(sys.argv[1:]).files
        table = tomllib.loads(Path(file).read_text())
        config = ServiceConfig.model_validate({name: table[name] for name in SECTIONS if name in table})
        well = asyncio.run(answers(config))
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
