"""After all that: every service is the process it was, holds what it held, and the run goes on."""

from __future__ import annotations

import time

import pytest
from stack import REPLICAS, rpc, until

pytestmark = pytest.mark.timeout(120, func_only=False)

DESCRIPTORS = 12
THREADS = 12
TASKS = 12
MEMORY_MB = 120.0
"""What may come on top: connections of peers, threads of pools, caches, what the allocator keeps."""
SETTLE_S = 20.0


def test_the_run_trains_on(stack):
    stack.wait_steps(3)


def test_no_service_met_a_bug(stack):
    assert stack.failures() == []


def test_streams_nobody_reads_were_ended_with_a_reason(stack):
    stack.run.wait_until(lambda: stack.stalled_streams("broadcaster") >= 5, 60)


async def test_nothing_is_held_once_the_run_pauses(stack):
    async with (
        stack.caller("orchestrator") as orchestrator,
        stack.caller("router") as router,
        stack.caller("sandbox") as sandbox,
        stack.caller("prefill-1") as prefill,
        stack.caller("decode-1") as decode,
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

        assert await until(at_rest, 60), held
        await orchestrator.ask(rpc("RunService.ResumeRun"), request_id="edges")
    stack.wait_steps(2)


def test_no_process_has_grown(stack):
    for client in stack.silent_clients:
        client.close()
    stack.silent_clients.clear()
    deadline_s = time.monotonic() + SETTLE_S
    while (grown := growth(stack)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert grown == []


def growth(stack) -> list[str]:
    found = []
    for replica, now in stack.vitals().items():
        before = stack.rested[replica]
        assert now.pid == before.pid
        if (
            now.descriptors > before.descriptors + DESCRIPTORS
            or now.threads > before.threads + THREADS
            or now.tasks > before.tasks + TASKS
            or now.memory_mb > before.memory_mb + MEMORY_MB
        ):
            found.append(f"{replica}: {before} has become {now}")
    return found


def test_it_stops_as_ever_and_leaves_nothing(stack):
    assert stack.run.slipstream("stop", "edges").returncode == 0
    assert stack.run.left_after(20.0) == []
    assert len(REPLICAS) == len(stack.rested)
