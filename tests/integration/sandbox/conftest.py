"""One executor with the real jail, behind real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from slipstream.api.sandbox.v1 import sandbox_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.runtime import build_server
from slipstream.common.sandbox_client import SandboxClient
from slipstream.sandbox.__main__ import SERVICE
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.execution import ExecPool
from slipstream.sandbox.executor import Executor, open_executor


class Running:
    """An executor under test, a client, and the stub for what the client does not do."""

    def __init__(self, executor: Executor, address: str) -> None:
        self.executor = executor
        self.address = address
        self.channel = open_channel(address, Access())
        self.stub = sandbox_pb2_grpc.SandboxServiceStub(self.channel)
        self.client = SandboxClient(address, Access())

    async def until(self, condition: Callable[[ExecPool], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self.executor.pool):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def idle(self, timeout_s: float = 30.0) -> None:
        """Returns when all places are free."""
        await self.until(lambda pool: not pool.running_count and not pool.open, timeout_s)


@pytest.fixture
def start_executor(make_config: Callable[..., SandboxConfig]):
    """`async with start_executor(max_running_execs=1) as running: ...`"""

    @asynccontextmanager
    async def start(**fields: object) -> AsyncIterator[Running]:
        config = make_config(SandboxConfig, **{"sweep_interval_s": 0.05, **fields})
        with open_executor(config) as executor:
            add = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server
            server, port = build_server(config, [(add, executor.servicer, SERVICE)])
            await server.start()
            running = Running(executor, f"127.0.0.1:{port}")
            sweep = asyncio.create_task(executor.table.sweep())
            try:
                yield running
            finally:
                sweep.cancel()
                await running.client.close()
                await running.channel.close()
                await server.stop(grace=1.0)
                await running.idle()

    return start


@pytest.fixture(params=["auto", "supervisor"])
async def running(request: pytest.FixtureRequest, start_executor) -> AsyncIterator[Running]:
    """An executor, once with the cgroups this machine allows, once without any."""
    async with start_executor(accounting=request.param) as running:
        yield running
