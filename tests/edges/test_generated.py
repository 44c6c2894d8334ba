"""Hundreds of requests an RPC that its proto did not mean: each gets a documented status, and soon."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import protovalidate
import pytest
from callers import Answer, Caller, fault
from contract import Rpc, rpcs
from google.protobuf.message import DecodeError
from messages import mutants
from stack import REPLICAS, Stack, rpc
from tame import base, honest, rename, undo, waits
from wire import flipped, length_delimited, malformed

from slipstream.common.channel import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.timeout(590, func_only=False)

AT_ONCE = 16
LEAST = 200
"""Requests an RPC, at least."""
AT_RANDOM = 40
"""Requests a service with bits turned over, whatever comes of them."""
DEADLINE_S = 60.0
"""Of calls that do not wait for anything."""
VALIDATOR = protovalidate.Validator()


@dataclass
class Case:
    """One request."""

    rpc: Rpc
    kind: str
    body: bytes
    message: Any = None
    """None where the bytes are no message."""
    violation: Any = None

    @property
    def too_large(self) -> bool:
        return len(self.body) > MAX_MESSAGE_BYTES

    @property
    def must_be_refused(self) -> bool:
        return self.message is None or self.violation is not None


def case(method: Rpc, kind: str, body: bytes) -> Case:
    try:
        message = method.request.FromString(body)
    except DecodeError:
        return Case(method, kind, body)
    violations = VALIDATOR.collect_violations(message, fail_fast=True)
    return Case(method, kind, body, message, violations[0] if violations else None)


def cases(stack: Stack, methods: list[Rpc], rng: random.Random, sandbox_id: str) -> Iterator[Case]:
    """Every mutation once, then random ones until each RPC has enough. None that would be obeyed to the run's harm."""
    methods = [method for method in methods if not method.client_streaming]
    counts = Counter[str]()
    for one in _cases(stack, methods, rng, sandbox_id):
        if one.must_be_refused or not honest(one.rpc, one.message):
            counts[one.rpc.name] += 1
            yield one
    for method in methods:
        body = base(stack, method, rng, sandbox_id).SerializeToString()
        while counts[method.name] < LEAST:
            one = case(method, *(flipped(body, rng) if rng.random() < 0.5 else noise(rng)))
            if one.must_be_refused:  # so many that were obeyed would be all that the run has time for
                counts[method.name] += 1
                yield one


def noise(rng: random.Random) -> tuple[str, bytes]:
    return "random bytes", rng.randbytes(rng.randint(1, 64))


def _cases(stack: Stack, methods: list[Rpc], rng: random.Random, sandbox_id: str) -> Iterator[Case]:
    for method in methods:
        request = base(stack, method, rng, sandbox_id)
        for kind, message in mutants(request, rng):
            if not kind.startswith("request_id"):
                rename(message, rng)
            yield case(method, kind, message.SerializeToString())
        for kind, body in malformed(request, rng):
            yield case(method, kind, body)
        padding = length_delimited(2000, bytes(MAX_MESSAGE_BYTES))
        yield case(method, "above 16 MiB", request.SerializeToString() + padding)
    for _ in range(AT_RANDOM):
        method = rng.choice(methods)
        yield case(method, *flipped(base(stack, method, rng, sandbox_id).SerializeToString(), rng))


@pytest.mark.parametrize("replica", REPLICAS)
async def test_every_request_near_the_proto_gets_a_documented_status(replica, stack):
    for service in stack.served[replica]:
        rng = stack.rng(replica, service)
        async with stack.caller(replica) as caller, sandbox(caller, service) as sandbox_id:
            # All are made before the first is sent: making them takes longer than answering.
            todo = list(cases(stack, rpcs()[service], rng, sandbox_id))
            assert enough(todo, service)
            faults = await fire(caller, iter(todo))
            assert not faults, f"{service}: {len(faults)}\n" + "\n".join(faults[:40])


def enough(todo: list[Case], service: str) -> bool:
    counts = Counter(one.rpc.name for one in todo)
    return all(counts[method.name] >= LEAST for method in rpcs()[service] if not method.client_streaming)


async def fire(caller: Caller, todo: Iterator[Case]) -> list[str]:
    """Send all, some at once; what was wrong with the answers."""
    faults: list[str] = []

    async def work() -> None:
        for one in todo:
            wrong = await shoot(caller, one)
            if wrong:
                faults.append(f"{one.rpc.short}, {one.kind}: {wrong}")

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return faults


async def shoot(caller: Caller, one: Case) -> str:
    if one.too_large:
        answer = await caller.call(one.rpc, one.body, timeout_s=DEADLINE_S)
        return "" if answer.status == ("RESOURCE_EXHAUSTED", "") else f"above 16 MiB: {answer}"
    lasting = one.message is not None and (waits(one.message) or one.rpc.name.startswith("Watch"))
    waiting = lasting and not one.must_be_refused
    answer = await caller.call(one.rpc, one.body, timeout_s=0.5 if waiting else DEADLINE_S, max_messages=4)
    if answer.code == "OK" and not one.must_be_refused:
        await undo(caller, one.rpc, one.message, answer)
    if one.must_be_refused:
        return wrongly_refused(one, answer)
    if waiting and answer.code == "DEADLINE_EXCEEDED":
        return ""
    return fault(one.rpc, answer) or (f"slow: {answer}" if answer.duration_s >= DEADLINE_S else "")


def wrongly_refused(one: Case, answer: Answer) -> str:
    """A request that breaks a rule must be refused as such, by name and limit."""
    if answer.status != ("INVALID_ARGUMENT", "INVALID_REQUEST"):
        return f"breaks a rule, but: {answer}"
    rule = one.violation.proto.rule_id if one.violation is not None else ""
    if rule.endswith(("gte", "lte", "len", "items", "bytes", "pairs")) and not answer.metadata.get("limit"):
        return f"names no limit: {answer}"
    return fault(one.rpc, answer)


@asynccontextmanager
async def sandbox(caller: Caller, service: str):
    """A sandbox for the calls that want one."""
    if not service.endswith(".SandboxService"):
        yield ""
        return
    created = await caller.ask(rpc("SandboxService.CreateSandbox"), request_id="edges", lease_ttl_ms=120_000)
    yield created.sandbox.sandbox_id
    await caller.ask(rpc("SandboxService.DeleteSandbox"), request_id="edges", sandbox_id=created.sandbox.sandbox_id)
