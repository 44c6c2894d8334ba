"""Same id, same answer."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.routing.v1.routing_pb2 import PlaceRequest, ReleaseRequest
from slipstream.common.errors import Overloaded, RequestIdReused
from slipstream.common.idempotency import RequestMemory


class Counter:
    def __init__(self):
        self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self):
        self.calls += 1
        call = self.calls
        await self.gate.wait()
        return call


async def test_a_repeat_gets_the_first_answer_and_starts_nothing():
    memory, run = RequestMemory(), Counter()
    request = PlaceRequest(request_id="a", group_id="g")
    assert [await memory.once(request, run) for _ in range(3)] == [1, 1, 1]
    assert await memory.once(ReleaseRequest(request_id="a"), run) == 2  # another method's ids are its own


async def test_the_same_id_with_another_body_is_refused():
    memory, run = RequestMemory(), Counter()
    await memory.once(PlaceRequest(request_id="a", group_id="g"), run)
    with pytest.raises(RequestIdReused):
        await memory.once(PlaceRequest(request_id="a", group_id="h"), run)


async def test_a_repeat_during_the_first_call_waits_for_it():
    memory, run = RequestMemory(), Counter()
    run.gate.clear()
    calls = [asyncio.ensure_future(memory.once(PlaceRequest(request_id="a"), run)) for _ in range(3)]
    await asyncio.sleep(0)
    run.gate.set()
    assert await asyncio.gather(*calls) == [1, 1, 1]


async def test_a_failure_is_not_remembered():
    memory, run = RequestMemory(), Counter()

    async def fail():
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        await memory.once(PlaceRequest(request_id="a"), fail)
    assert await memory.once(PlaceRequest(request_id="a"), run) == 1


async def test_when_the_first_caller_goes_away_a_waiting_repeat_runs():
    memory, run = RequestMemory(), Counter()
    run.gate.clear()
    first, second = (asyncio.ensure_future(memory.once(PlaceRequest(request_id="a"), run)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    run.gate.set()
    assert await second == 2


async def test_answers_are_bounded_in_number_and_age():
    memory, run = RequestMemory(capacity=2), Counter()
    for name in "abc":
        await memory.once(PlaceRequest(request_id=name), run)
    assert await memory.once(PlaceRequest(request_id="c"), run) == 3
    assert await memory.once(PlaceRequest(request_id="a"), run) == 4
    memory, run = RequestMemory(ttl_s=0.01), Counter()
    await memory.once(PlaceRequest(request_id="a"), run)
    await asyncio.sleep(0.02)
    assert await memory.once(PlaceRequest(request_id="a"), run) == 2


async def test_answers_are_bounded_in_bytes_and_a_long_poll_keeps_none_of_them():
    memory = RequestMemory(capacity=1000, ttl_s=60.0, limit_bytes=10_000)
    release = asyncio.Event()
    calls = 0

    async def poll() -> runner_pb2.AcquireGroupsResponse:
        await release.wait()
        return runner_pb2.AcquireGroupsResponse()

    async def answer() -> runner_pb2.AcquireGroupsResponse:
        nonlocal calls
        calls += 1
        return runner_pb2.AcquireGroupsResponse(groups=[runner_pb2.GroupAssignment(salt="s" * 990)])

    polling = asyncio.ensure_future(memory.once(runner_pb2.AcquireGroupsRequest(request_id="poll"), poll))
    await asyncio.sleep(0)
    requests = [runner_pb2.AcquireGroupsRequest(request_id=str(number)) for number in range(100)]
    for request in requests:
        await memory.once(request, answer)
    await memory.once(requests[-5], answer)
    assert calls == 100, "the newest are remembered"
    await memory.once(requests[0], answer)
    assert calls == 101, "the oldest are not"
    release.set()
    await polling
