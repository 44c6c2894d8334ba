"""A broadcaster, and trainers that lend: in this process, or in one that can be killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from straight_trainer import Trainer

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.broadcaster.config import BroadcasterConfig
from slipstream.broadcaster.publications import Publications
from slipstream.broadcaster.servicer import BroadcastServicer
from slipstream.broadcaster.store import VersionStore
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.config import ServiceConfig
from slipstream.common.runtime import build_server
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.weights.straight.host import HostReceiver
from slipstream.weights.straight.transport import StraightWeightTransport
from slipstream.weights.transport import GrpcWeightTransport

START_S = 100.0
READ_S = 60.0


class Redis:
    """What a broadcaster keeps there."""

    async def advance(self, key: str, version: PolicyVersion) -> bool:
        return True

    async def version(self, key: str) -> PolicyVersion:
        return UNSET


class World:
    """One broadcaster, and whoever publishes and reads there."""

    def __init__(self, make_config) -> None:
        self.make_config = make_config
        self.fetched: list[tuple[str, int]] = []
        self.trainers: list[Trainer] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self.channels = Channels(lambda address: open_channel(address, Access()))

    async def start(self) -> None:
        config = self.make_config(BroadcasterConfig, max_store_bytes=100_000)
        self.store = VersionStore(config.run_dir / "versions", config.max_store_bytes)
        servicer = BroadcastServicer(self.store, Publications(self.store, Redis(), 3, 60.0))
        add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
        service = "slipstream.api.broadcast.v1.BroadcastService"
        self.server, port = build_server(config, [(add, servicer, service)])
        await self.server.start()
        self.address = f"127.0.0.1:{port}"
        self.channel = open_channel(self.address, Access())

    async def stop(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()
        for trainer in self.trainers:
            await trainer.stop()
        await self.channels.close()
        await self.channel.close()
        await self.server.stop(None)

    async def trainer(self, transport: str, lease_s: float = 30.0) -> Trainer:
        trainer = Trainer(transport, GrpcWeightTransport(self.channel), lease_s)
        await trainer.start(self.make_config(ServiceConfig))
        self.trainers.append(trainer)
        return trainer

    async def process(self, transport: str) -> asyncio.subprocess.Process:
        """A trainer that can die."""
        script = Path(__file__).parent / "straight_trainer.py"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), self.address, transport, stdin=pipe, stdout=pipe, env={**os.environ}
        )
        self.processes.append(process)
        assert await self.said(process) == "ready"
        return process

    async def keep(self, process: asyncio.subprocess.Process, step: int) -> None:
        assert process.stdin is not None
        process.stdin.write(f"keep {step}\n".encode())
        assert await self.said(process) == f"kept {step}"

    async def said(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            while (line := (await process.stdout.readline()).decode().strip()).split(" ")[0] not in ("ready", "kept"):
                assert line, "the trainer has ended"  # NIXL prints, too
        return line

    def reader(self, transport: str, timeout_s: float = READ_S) -> StraightWeightTransport:
        """A worker's side, into this process's memory."""
        note = lambda name, size_bytes, seconds: self.fetched.append((name, size_bytes))  # noqa: E731
        return StraightWeightTransport(
            self.channel, transport, HostReceiver(), self.channels.get, timeout_s, on_fetched=note
        )


@pytest.fixture
async def world(make_config) -> AsyncIterator[World]:
    world = World(make_config)
    await world.start()
    yield world
    await world.stop()
