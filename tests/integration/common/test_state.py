"""Redis state against a real server."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis import asyncio as redis
from redis.exceptions import ResponseError

from slipstream.common.errors import StateUnavailable
from slipstream.common.state import PUBLISHED, State
from slipstream.common.version import UNSET, PolicyVersion

DEADLINE_S = 60.0
"""By then a thing has happened that is going to happen, on any machine."""


@pytest.fixture
async def connect(valkey_url):
    states = []

    def connect(run_id):
        states.append(State(valkey_url, run_id))
        return states[-1]

    yield connect
    for state in states:
        await state.close()


@pytest.fixture
def state(connect, tmp_path):
    return connect(tmp_path.name)


async def test_a_version_moves_forward_only(state):
    assert await state.version(PUBLISHED) == UNSET
    assert await state.advance(PUBLISHED, PolicyVersion(1, 5))
    assert not await state.advance(PUBLISHED, PolicyVersion(1, 5))
    assert not await state.advance(PUBLISHED, PolicyVersion(1, 4))
    assert await state.advance(PUBLISHED, PolicyVersion(2, 1))
    assert await state.version(PUBLISHED) == PolicyVersion(2, 1)


async def test_writers_that_race_leave_the_highest_version(state):
    steps = list(range(40))
    random.Random(0).shuffle(steps)
    moved = await asyncio.gather(*(state.advance(PUBLISHED, PolicyVersion(1, step)) for step in steps))
    assert any(moved)
    assert await state.version(PUBLISHED) == PolicyVersion(1, 39)


async def test_a_lease_has_one_owner_until_it_is_released_or_expires(state):
    assert await state.acquire("worker/decode-1", "a", ttl_s=5, fields={"address": "x:1"})
    assert not await state.acquire("worker/decode-1", "b", ttl_s=5)
    assert not await state.renew("worker/decode-1", "b", ttl_s=5)
    assert not await state.release("worker/decode-1", "b")
    assert (await state.leases("worker/"))["worker/decode-1"].fields == {"address": "x:1"}
    assert await state.release("worker/decode-1", "a")
    assert await state.acquire("worker/decode-1", "b", ttl_s=0.05)
    async with asyncio.timeout(DEADLINE_S):
        while await state.lease("worker/decode-1") is not None:  # noqa: ASYNC110 it tells nobody
            await asyncio.sleep(0.02)
    assert not await state.renew("worker/decode-1", "b", ttl_s=5)


async def test_a_follower_resumes_after_the_change_it_saw_last(state):
    for step in range(3):
        await state.advance(PUBLISHED, PolicyVersion(1, step))
    first = await anext(state.follow())
    assert (first.key, first.value) == (PUBLISHED, "1.0")
    assert (await anext(state.follow(first.id))).value == "1.1"
    end = await state.last_change()
    waiting = asyncio.ensure_future(anext(state.follow(end)))
    await state.advance(PUBLISHED, PolicyVersion(1, 9))
    assert (await waiting).value == "1.9"


async def test_plain_values_expire(state):
    await state.put("dispatch/g1", "1.3", ttl_s=3600)
    assert await state.get("dispatch/g1") == "1.3"
    await state.put("dispatch/g1", "1.3", ttl_s=0.05)
    async with asyncio.timeout(DEADLINE_S):
        while await state.get("dispatch/g1") is not None:  # noqa: ASYNC110 it tells nobody
            await asyncio.sleep(0.02)


async def test_runs_on_one_server_do_not_see_each_other(connect):
    await connect("a").advance(PUBLISHED, PolicyVersion(1, 1))
    assert await connect("b").version(PUBLISHED) == UNSET


async def test_a_server_that_is_away_is_said_at_once_and_used_again_when_back(own_valkey):
    state = State(own_valkey.url, "run")
    await state.advance(PUBLISHED, PolicyVersion(1, 1))
    own_valkey.kill()
    for _ in range(2):
        with pytest.raises(StateUnavailable):
            await state.advance(PUBLISHED, PolicyVersion(1, 2))
    own_valkey.start()
    assert await state.advance(PUBLISHED, PolicyVersion(1, 2))
    await state.close()


FULL = ("CONFIG", "SET", "maxmemory", "1")
ROOM = ("CONFIG", "SET", "maxmemory", "0")
REFUSALS = {
    "full": (FULL, ROOM, "maxmemory"),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "read only replica"),
    "replicas": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "NOREPLICAS",
    ),
}
WRITES = {
    "advance": lambda state: state.advance(PUBLISHED, PolicyVersion(1, 2)),
    "acquire": lambda state: state.acquire("worker/decode-1", "a", ttl_s=5),
    "put": lambda state: state.put("dispatch/g1", "1.3"),
    "write_many": lambda state: state.write_many({"placement/1": "x", "placement/2": "y"}, ["placement/3"], 5.0),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("write", WRITES)
async def test_a_server_that_takes_no_write_now_is_unavailable_and_takes_it_later(own_valkey, refusal, write):
    refuse, take, named = REFUSALS[refusal]
    server = redis.Redis.from_url(own_valkey.url)
    state = State(own_valkey.url, "run")
    try:
        assert await state.advance(PUBLISHED, PolicyVersion(1, 1))
        await server.execute_command(*refuse)
        with pytest.raises(StateUnavailable, match=named):
            await WRITES[write](state)
        assert await state.version(PUBLISHED) == PolicyVersion(1, 1)
        await server.execute_command(*take)
        await WRITES[write](state)
    finally:
        await state.close()
        await server.aclose()


async def test_a_refusal_that_does_not_pass_is_no_outage(state, valkey_url, tmp_path):
    server = redis.Redis.from_url(valkey_url)
    try:
        await server.lpush(f"slipstream:{tmp_path.name}:{PUBLISHED}", "a list")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await state.version(PUBLISHED)
    finally:
        await server.aclose()
