"""From the resolved configuration of each service to the processes of a run."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.auth import Access, read_token
from slipstream.common.channel import AioChannel, open_channel
from slipstream.common.config import ServiceConfig, TlsConfig, dump_toml
from slipstream.common.tls import TlsMaterial
from slipstream.launcher.cards import variables_of
from slipstream.launcher.config import RunConfig
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.rundir import RunDir
from slipstream.trainer.config import TrainerConfig

HEALTH_TIMEOUT_S = 2.0
ONE_THREAD = ("OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false")
"""A service has threads of its own; libraries that start one a core would only get in each other's way."""


def resumable(replica: str, configs: Mapping[str, ServiceConfig]) -> bool:
    """Whether a new process goes on where the dead one was; a trainer without checkpoints does not."""
    config = configs[replica]
    return not isinstance(config, TrainerConfig) or config.checkpoint.interval_steps > 0


def write_configs(run: RunDir, configs: Mapping[str, ServiceConfig]) -> None:
    """Write one file a process: what `slipstream-<service> @ FILE` takes."""
    for replica, config in configs.items():
        run.service_config(replica).write_text(dump_toml(config))


def write_targets(run: RunDir, metrics: Mapping[str, str]) -> None:
    """Name every service's metrics for Prometheus's `file_sd_configs`."""
    targets = [
        {"targets": [address], "labels": {"run": run.name, "service": service_of(replica), "replica": replica}}
        for replica, address in metrics.items()
    ]
    run.targets_file.write_text(json.dumps(targets, indent=1) + "\n")


def service_of(replica: str) -> str:
    """`decode` for `decode-1`: the package of the service."""
    return replica.partition("-")[0]


def access_to(run: RunDir) -> Access:
    """What the launcher's own calls to the services of a run need: the same as theirs to each other.

    Raises `ConfigError`, and `OSError` where the run has no configuration.
    """
    table = tomllib.loads(run.config_file.read_text())
    return Access(read_token(run.token_file), TlsMaterial.load(TlsConfig.model_validate(table.get("tls", {}))))


def service_specs(
    config: RunConfig, run: RunDir, endpoints: Mapping[str, str], access: Access, configs: Mapping[str, ServiceConfig]
) -> list[ProcessSpec]:
    """Raises `ConfigError` for a card that is not there."""
    return [
        ProcessSpec(
            replica,
            service_command(f"slipstream.{service_of(replica)}", run, replica, variables_of(config, replica)),
            log_file=run.log_file(replica),
            output_file=run.output_file(replica),
            ready=HealthCheck(address, access),
            resumable=resumable(replica, configs),
            group="trainer" if service_of(replica) == "trainer" else "",
        )
        for replica, address in endpoints.items()
    ]


def service_command(module: str, run: RunDir, replica: str, variables: tuple[str, ...] = ()) -> tuple[str, ...]:
    """`variables`: `NAME=VALUE` of its environment."""
    started = (sys.executable, "-m", module, "@", str(run.service_config(replica)))
    return ("/usr/bin/env", *ONE_THREAD, *variables, *started)


class HealthCheck:
    """Whether a server answers the gRPC health protocol.

    Any answer counts: a worker says NOT_SERVING until its first weights, which the warm-up has yet to make.
    """

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self._access = access
        self._channel: AioChannel | None = None

    async def __call__(self) -> bool:
        if await self.status() is None:
            return False
        await self.close()
        return True

    async def status(self) -> str | None:
        """SERVING, NOT_SERVING ..., or None when nobody answers."""
        if not await self._listening():
            return None
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            return None
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    @property
    def channel(self) -> AioChannel:
        """To the server, for further questions; open until `close`."""
        self._channel = self._channel or open_channel(self.address, self._access)
        return self._channel

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _listening(self) -> bool:
        # Asked first, as a channel that failed once waits before it tries again.
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
