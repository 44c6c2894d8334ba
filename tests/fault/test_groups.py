"""A rank of a data-parallel group is killed in a run: the whole group is out, and comes back at what the run serves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from run_process import DEADLINE_S, PREFILLING, RunProcess, open_positions, terminal_outcomes

from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.common.auth import Access, read_token
from slipstream.common.channel import open_channel
from slipstream.common.version import PolicyVersion
from tests import standstill

pytestmark = pytest.mark.timeout(590, func_only=False)

Workers = dict[str, routing_pb2.RoutedWorker]
GROUPS = {"decode-1": ["decode-1-0", "decode-1-1"], "decode-2": ["decode-2-0", "decode-2-1"]}
KILLED = ("decode-1-1", "decode-2-0")
"""A rank that follows, and one that leads."""


class Router:
    """What the router of a run says of its workers."""

    def __init__(self, run: RunProcess, stub: routing_pb2_grpc.RouterServiceStub) -> None:
        self._run = run
        self._stub = stub

    async def workers(self) -> Workers:
        answer = await self._stub.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=60)
        return {worker.ref.replica: worker for worker in answer.workers}

    async def until(self, condition: Callable[[Workers], bool]) -> Workers:
        """Wait while the run goes on."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition(workers := await self.workers()):
            assert self._run.process.poll() is None, self._run.output
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {workers}\n{self._run.output}"
            await asyncio.sleep(0.02)
        return workers


@asynccontextmanager
async def router_of(run: RunProcess) -> AsyncIterator[Router]:
    address = f"127.0.0.1:{run.setting('router', 'listen', 'port')}"
    async with open_channel(address, Access(read_token(run.path / "token"))) as channel:
        yield Router(run, routing_pb2_grpc.RouterServiceStub(channel))


def routable(workers: Workers, group: str) -> set[bool]:
    return {workers[replica].routable for replica in GROUPS[group]}


def versions(workers: Workers, group: str) -> set[PolicyVersion]:
    return {PolicyVersion.from_proto(workers[replica].version) for replica in GROUPS[group]}


async def test_a_dead_rank_takes_its_group_out_until_it_is_whole_and_the_run_loses_nothing(launch):
    run = launch(
        "run",
        *PREFILLING,
        *("--decode.replicas", "2", "--decode.data-parallel-size", "2"),
        *("--launcher.restart", "on_failure", "--orchestrator.total-steps", "100000"),
        # Nothing is learned, so that rewards go on to differ and steps to come at the same pace.
        *("--trainer.optim.lr", "1e-9"),
    )
    run.wait_step(2)
    async with router_of(run) as router:
        for killed in KILLED:
            await router.until(lambda workers: all(worker.routable for worker in workers.values()))
            await out_and_back(run, router, killed)
    old = open_positions(run.journal())
    run.wait_until(lambda: not old & open_positions(run.journal()))
    assert run.slipstream("stop", "run").returncode == 0
    assert run.end() == 0, run.output
    assert [event["replica"] for event in run.events("service_died")] == list(KILLED)
    assert [event["replica"] for event in run.events("service_restart")] == list(KILLED)
    assert terminal_outcomes(run.journal()) <= {0, 1}, "what ran when it was asked to stop has none"
    assert [record for record in run.journal() if record["kind"] == "lost" or record.get("outcome") == "failed"] == []
    assert run.left_after() == []


async def out_and_back(run: RunProcess, router: Router, killed: str) -> None:
    group = killed.rpartition("-")[0]
    (other,) = GROUPS.keys() - {group}
    pid = run.pid(killed)
    placed: list[int] = []
    standstill.stop(run.process.pid)  # the launcher, so that nothing is started again before the rest has been seen
    try:
        os.kill(pid, signal.SIGKILL)
        await router.until(lambda workers: routable(workers, group) == {False})
        step = len(run.metrics("step"))

        def goes_on(workers: Workers) -> bool:
            assert routable(workers, group) == {False}
            placed.append(sum(workers[replica].placement_count for replica in GROUPS[group]))
            return routable(workers, other) == {True} and len(run.metrics("step")) >= step + 3

        await router.until(goes_on)
    finally:
        run.process.send_signal(signal.SIGCONT)
    assert placed == sorted(placed, reverse=True), "nothing is placed on the ranks that live"
    await router.until(lambda workers: routable(workers, group) == {True})
    assert run.pid(killed) != pid
    now = max(versions(await router.workers(), other))
    await router.until(lambda workers: min(versions(workers, group)) >= now)
