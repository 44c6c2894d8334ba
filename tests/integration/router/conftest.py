"""A whole router in this process, with stand-ins for the workers and a real Valkey."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from slipstream.api.inference.v1 import worker_pb2, worker_pb2_grpc
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, WorkerEndpoint
from slipstream.common.errors import from_rpc_error
from slipstream.common.runtime import build_server
from slipstream.common.state import State
from slipstream.common.version import PolicyVersion
from slipstream.router.__main__ import run
from slipstream.router.config import RouterConfig
from tests.ports import free_port

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
REPORT_PERIOD_S = 0.05
DEADLINE_S = 60.0
"""By then a thing has happened that is going to happen, on any machine."""


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker as routers see it: load reports, until it is stopped or falls silent."""

    def __init__(self, replica: str, role: worker_pb2.WorkerRole) -> None:
        self.replica, self.role = replica, role
        self.port = free_port()
        self.epoch = "first"
        self.state: worker_pb2.WorkerState = worker_pb2.WORKER_STATE_SERVING
        self.version = PolicyVersion(1, 3)
        self.running = 0
        self.mark = 0
        """Sent with each report, as a figure that no router looks at."""
        self.silent = False
        self._events = b""
        self._server: grpc.aio.Server

    def stores(self, *block_hashes: int) -> None:
        self._events += b"".join(struct.pack("<BQ", 1, block_hash) for block_hash in block_hashes)

    async def GetWorker(self, request: Any, context: Any) -> worker_pb2.GetWorkerResponse:
        limits = worker_pb2.WorkerLimits(max_running_samples=64, block_size_tokens=4)
        return worker_pb2.GetWorkerResponse(replica=self.replica, epoch=self.epoch, role=self.role, limits=limits)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        for sequence in itertools.count(1):
            while self.silent:  # noqa: ASYNC110 it hangs, from the router's point of view
                await asyncio.sleep(REPORT_PERIOD_S)
            events, self._events = self._events, b""
            yield worker_pb2.WatchLoadResponse(
                epoch=self.epoch,
                sequence=sequence,
                state=self.state,
                version=self.version.to_proto(),
                load=worker_pb2.Load(running_sample_count=self.running, sampled_token_count=self.mark),
                kv_events=events,
                role=self.role,
            )
            await asyncio.sleep(REPORT_PERIOD_S)

    async def start(self, make_config: Callable[..., Any]) -> None:
        config = make_config(listen=ListenConfig(port=self.port))
        add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        self._server, _ = build_server(config, [(add, self, "")])
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


class World:
    """The router and its workers: two of each pool."""

    def __init__(self, make_config: Callable[..., Any], redis_url: str, pools: tuple[str, ...]) -> None:
        names = [f"{pool}-{number}" for pool in pools for number in (1, 2)]
        self.workers = {name: FakeWorker(name, PREFILL if name.startswith("prefill") else DECODE) for name in names}
        self.router: Any = None
        self.state: State
        self.make_config = make_config
        self._redis_url = redis_url
        self._numbers = itertools.count(1)

    async def start(self, stack: AsyncExitStack, **fields: Any) -> None:
        for worker in self.workers.values():
            await worker.start(self.make_config)
            stack.push_async_callback(worker.stop)
        endpoints = {
            role: [
                WorkerEndpoint(replica=worker.replica, address=f"127.0.0.1:{worker.port}")
                for worker in self.workers.values()
                if worker.role == role
            ]
            for role in (PREFILL, DECODE)
        }
        port = free_port()
        config = self.make_config(
            RouterConfig,
            redis_url=self._redis_url,
            listen=ListenConfig(port=port),
            prefill_workers=endpoints[PREFILL],
            decode_workers=endpoints[DECODE],
            **fields,
        )
        self.state = State(config.redis.url, config.run_id)
        stack.push_async_callback(self.state.close)
        self.address = f"127.0.0.1:{port}"
        channel = await stack.enter_async_context(open_channel(self.address, Access()))
        self.router = routing_pb2_grpc.RouterServiceStub(channel)
        process = asyncio.create_task(run(config))
        stack.push_async_callback(self._end, process)
        async with asyncio.timeout(DEADLINE_S):
            await channel.channel_ready()
        await self.until(lambda workers: all(worker.routable for worker in workers.values()))
        await self.placeable()

    async def _end(self, process: asyncio.Task[None]) -> None:
        process.cancel()
        await asyncio.wait([process])
        assert process.cancelled(), process.exception()

    def request(self, *block_hashes: int, step: int = 3, **fields: Any) -> routing_pb2.PlaceRequest:
        request = {
            "request_id": f"request-{next(self._numbers)}",
            "group_id": "g",
            "block_hashes": block_hashes,
            "prompt_token_count": 11,
            "sample_count": 8,
            "max_new_tokens": 10,
            "min_policy_version": PolicyVersion(1, step).to_proto(),
        }
        return routing_pb2.PlaceRequest(**{**request, **fields})

    async def place(self, *block_hashes: int, step: int = 3, **fields: Any) -> routing_pb2.PlaceResponse:
        return await self.router.Place(self.request(*block_hashes, step=step, **fields), timeout=DEADLINE_S)

    async def placeable(self) -> None:
        """Wait until Redis is known to be there."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await self.release((await self.place()).placement_id)
                    return
                except grpc.aio.AioRpcError as error:
                    if from_rpc_error(error).reason != "STATE_UNAVAILABLE":
                        raise
                await asyncio.sleep(0.05)

    async def refused(self, **fields: Any) -> str:
        """The reason why Place refuses."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.place(**fields)
        return from_rpc_error(caught.value).reason

    async def release(self, *placement_ids: str) -> int:
        request = routing_pb2.ReleaseRequest(request_id="r", placement_ids=placement_ids)
        return (await self.router.Release(request, timeout=DEADLINE_S)).released_count

    async def list(self) -> dict[str, routing_pb2.RoutedWorker]:
        response = await self.router.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=DEADLINE_S)
        return {worker.ref.replica: worker for worker in response.workers}

    async def until(self, condition: Callable[[dict[str, routing_pb2.RoutedWorker]], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(await self.list()):  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.02)

    async def heard(self) -> None:
        """Wait until the router has heard of every worker what is now to be said of it."""
        marks = {name: next(self._numbers) for name in self.workers}
        for name, worker in self.workers.items():
            worker.mark = marks[name]
        await self.until(lambda workers: all(workers[name].load.sampled_token_count == marks[name] for name in marks))

    async def until_refused(self, reason: str) -> None:
        """Wait until Place refuses for this reason; what it still places is released."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await self.release((await self.place()).placement_id)
                except grpc.aio.AioRpcError as error:
                    if from_rpc_error(error).reason == reason:
                        return
                    raise
                await asyncio.sleep(0.02)

    async def mirrored(self, placement_id: str, there: bool = True) -> str | None:
        """What Redis has of a placement, once it has it or has it no more."""
        async with asyncio.timeout(DEADLINE_S):
            while ((held := await self.state.get(f"placement/{placement_id}")) is not None) != there:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return held


@pytest.fixture
async def start_world(make_config: Callable[..., Any], own_valkey: Any) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(pools: tuple[str, ...] = ("prefill", "decode"), **fields: Any) -> World:
            world = World(make_config, own_valkey.url, pools)
            await world.start(stack, **fields)
            return world

        yield start


@pytest.fixture
async def world(start_world: Callable[..., Any]) -> World:
    return await start_world()
