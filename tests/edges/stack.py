"""One running stack under fire: who serves what, how each process fares, and whether the run goes on."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from callers import Caller, calling
from contract import PACKAGE, Rpc, rpcs
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http2 import SilentClient
from run_process import RunProcess, read_lines

from slipstream.common.auth import Access, read_token
from slipstream.common.channel import open_channel
from slipstream.launcher.ports import read_endpoints

REPLICAS = ("orchestrator", "broadcaster", "router", "sandbox", "prefill-1", "decode-1", "runner-1", "trainer")
REST_S = 180.0
"""By then a paused run holds nothing and nobody grows any more, on any machine."""
TASKS = "slipstream_event_loop_tasks"


@dataclass(frozen=True)
class Vitals:
    """What a leak would show in."""

    pid: int
    descriptors: int
    threads: int
    memory_mb: float
    tasks: int


class Stack:
    """A run of all services that trains while it is ill-treated."""

    def __init__(self, run: RunProcess, seed: int) -> None:
        self.run = run
        self.seed = seed
        self.endpoints = read_endpoints(run.path / "endpoints.toml")
        self.token = read_token(run.path / "token")
        self.served: dict[str, list[str]] = {}
        """Names of our services, by replica."""
        self.rested: dict[str, Vitals] = {}
        """Taken before the first blow, the run paused: how many groups it has otherwise is for it to say."""
        self.silent_clients: list[SilentClient] = []
        """They call and never read, from before the first test to after the last."""

    def rng(self, *names: str) -> random.Random:
        """Randomness of one test, the same for the same seed."""
        return random.Random(f"{self.seed} {' '.join(names)}")

    @asynccontextmanager
    async def caller(self, replica: str, token: str | None = "") -> AsyncIterator[Caller]:
        async with calling(self.endpoints[replica], self.token if token == "" else token) as caller:
            yield caller

    async def discover(self) -> None:
        """Ask every server by reflection what it serves."""
        for replica in REPLICAS:
            opened: Any = open_channel(self.endpoints[replica], Access(self.token))
            async with opened as channel:
                stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                async for answer in stub.ServerReflectionInfo(iter([request]), timeout=60, wait_for_ready=True):
                    names = [service.name for service in answer.list_services_response.service]
                    self.served[replica] = [name for name in names if name.startswith(PACKAGE)]
                    break

    async def pause(self) -> dict[str, int]:
        """Pause the run until nothing of it is held anywhere; returns what still is after a while."""
        async with (
            self.caller("orchestrator") as orchestrator,
            self.caller("router") as router,
            self.caller("sandbox") as sandbox,
            self.caller("prefill-1") as prefill,
            self.caller("decode-1") as decode,
        ):
            await orchestrator.ask(rpc("RunService.PauseRun"), request_id="edges")
            held: dict[str, int] = {}

            async def at_rest() -> bool:
                run = (await orchestrator.ask(rpc("RunService.GetRun"))).run
                workers = (await router.ask(rpc("RouterService.ListWorkers"))).workers
                capacity = await sandbox.ask(rpc("SandboxService.GetCapacity"))
                open_sandboxes = (await sandbox.ask(rpc("SandboxService.ListSandboxes"))).sandboxes
                loads = [(await worker.ask(rpc("WorkerService.GetWorker"))).load for worker in (prefill, decode)]
                held.update(
                    groups=run.running_group_count,
                    placements=sum(worker.placement_count for worker in workers),
                    programs=capacity.running_execs + capacity.waiting_execs,
                    sandboxes=sum(box.lease_ttl_ms != 60_000 for box in open_sandboxes),  # the run's own has a minute
                    blocks=sum(load.blocks_used for load in loads),
                    samples=sum(load.running_sample_count + load.waiting_request_count for load in loads),
                )
                return not any(held.values())

            return {} if await until(at_rest, REST_S) else held

    async def go_on(self) -> None:
        async with self.caller("orchestrator") as orchestrator:
            await orchestrator.ask(rpc("RunService.ResumeRun"), request_id="edges")

    def call_silently(self, replica: str, streams: int) -> SilentClient:
        """Open every server stream of a process some times, and read none of them."""
        client = SilentClient(self.endpoints[replica], self.token)
        for service in self.served[replica]:
            for method in rpcs()[service]:
                if method.server_streaming and not method.client_streaming:
                    for _ in range(streams):
                        client.call(method.path, self._long_answered(method))
        return client

    def _long_answered(self, method: Rpc) -> bytes:
        """A request whose answer is longer than any buffer, where there is such a one."""
        fields: dict[str, Any] = {}
        if method.name == "FetchSlices":  # if the run has moved on by then, it is a short answer
            newest = max(self.run.path.glob("versions/1.*"), key=lambda path: int(path.name.partition(".")[2]))
            fields = {"version": {"incarnation": 1, "step": int(newest.name[2:])}, "slice_indexes": [0] * 500}
        return method.request(**fields).SerializeToString()

    @contextmanager
    def silent(self, replica: str) -> Iterator[None]:
        """More silent clients, which leave in the middle."""
        clients = [self.call_silently(replica, 10) for _ in range(5)]
        try:
            yield
        finally:
            for client in clients:
                client.close()

    def stalled_streams(self, replica: str) -> int:
        """Streams that a process has ended because nobody read them."""
        lines = read_lines(self.run.path / "logs" / f"{replica}.log")
        return sum(line.get("reason") == "STREAM_STALLED" for line in lines)

    def vitals(self) -> dict[str, Vitals]:
        return {replica: self._vitals(replica) for replica in REPLICAS}

    def _vitals(self, replica: str) -> Vitals:
        process = psutil.Process(self.run.pid(replica))
        with process.oneshot():
            return Vitals(
                process.pid,
                process.num_fds(),
                process.num_threads(),
                round(process.memory_info().rss / 1e6, 1),
                int(self.metric(replica, TASKS)),
            )

    def metric(self, replica: str, name: str) -> float:
        """One value of what a process shows Prometheus."""
        host = self.endpoints[replica].rpartition(":")[0]
        port = self.run.setting(replica, "metrics", "port")
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))

    def trained_steps(self) -> int:
        return len(self.run.metrics("step"))

    def failures(self) -> list[str]:
        """Bugs that services logged: exceptions that no caller hears of, and what asyncio never saw an end of."""
        found = []
        for replica in REPLICAS:
            for line in read_lines(self.run.path / "logs" / f"{replica}.log"):
                if line.get("event") == "rpc_failed" or line.get("level") in ("critical",) or "exception" in line:
                    found.append(f"{replica}: {line.get('event')} {line.get('method', '')} {line.get('exception', '')}")
        return found

    def wait_steps(self, more: int) -> None:
        """Wait until so many more steps are trained."""
        goal = self.trained_steps() + more
        self.run.wait_until(lambda: self.trained_steps() >= goal)


def rpc(name: str) -> Rpc:
    """`rpc("RouterService.Place")`."""
    service, _, method = name.partition(".")
    return next(r for rs in rpcs().values() for r in rs if r.short == f"{service}.{method}")


async def until(condition: Any, timeout_s: float) -> bool:
    """Ask `condition`, a coroutine function, until it says yes."""
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.2)
    return True
