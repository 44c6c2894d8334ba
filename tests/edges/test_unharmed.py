"""After all that: every service is the process it was, holds what it held, and the run goes on."""

from __future__ import annotations

import pytest
from stack import REPLICAS, REST_S, until

pytestmark = pytest.mark.timeout(590, func_only=False)

DESCRIPTORS = 12
THREADS = 12
TASKS = 12
MEMORY_MB = 120.0
"""What may come on top: connections of peers, threads of pools, caches, what the allocator keeps."""


def test_the_run_trains_on(stack):
    stack.wait_steps(3)


def test_no_service_met_a_bug(stack):
    assert stack.failures() == []


def test_streams_nobody_reads_were_ended_with_a_reason(stack):
    stack.run.wait_until(lambda: stack.stalled_streams("broadcaster") >= 5)


async def test_nothing_is_held_once_the_run_pauses(stack):
    assert await stack.pause() == {}
    await stack.go_on()
    stack.wait_steps(2)


async def test_no_process_has_grown(stack):
    for client in stack.silent_clients:
        client.close()
    stack.silent_clients.clear()
    assert await stack.pause() == {}
    grown: list[str] = []

    async def as_before() -> bool:
        grown[:] = growth(stack)
        return not grown

    assert await until(as_before, REST_S), grown


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
    assert stack.run.left_after() == []
    assert len(REPLICAS) == len(stack.rested)
