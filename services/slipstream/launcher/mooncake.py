"""The master of a Mooncake store, where a pool of the run names one on this host."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

from slipstream.common.addresses import is_loopback
from slipstream.common.config import ConfigError
from slipstream.launcher.config import RunConfig
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.rundir import RunDir

REPLICA = "mooncake"
CONNECT_TIMEOUT_S = 1.0


def binary_path() -> Path:
    """The server inside Mooncake's wheel. Found, not imported."""
    spec = importlib.util.find_spec("mooncake")
    path = Path(spec.origin).parent / "mooncake_master" if spec and spec.origin else None
    if path is None or not path.exists():
        raise ConfigError(
            "engine.offload.mooncake_master needs Mooncake, which is not installed; run: make install-vllm"
        )
    return path


def masters_of(config: RunConfig) -> list[str]:
    """The addresses on loopback that pools name; a master elsewhere is somebody else's to start."""
    engines: list[Any] = [getattr(config.section(pool), "engine", None) for pool in ("prefill", "decode")]
    named = {engine.offload.mooncake_master for engine in engines if getattr(engine, "offload", None) is not None}
    return sorted(address for address in named if address and is_loopback(address.rpartition(":")[0]))


def mooncake_specs(config: RunConfig, run: RunDir) -> list[ProcessSpec]:
    """One process for each. Always restarted: a store that forgot everything is one that misses."""
    return [_spec(f"{REPLICA}-{index}", address, run) for index, address in enumerate(masters_of(config))]


def _spec(replica: str, address: str, run: RunDir) -> ProcessSpec:
    host, _, port = address.rpartition(":")
    log_file = run.log_file(replica)
    return ProcessSpec(
        replica,
        (str(binary_path()), f"-rpc_address={host}", f"-rpc_port={port}", "-metrics_port=0"),
        log_file=log_file,
        output_file=log_file,
        ready=lambda: accepts(host, int(port)),
        always_restart=True,
        stops_last=True,
    )


async def accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True
