"""What the client does when the connection, the server or the caller is at fault."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from slipstream_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Unauthenticated,
    Unreachable,
)
from slipstream_client.fake import FakeServer, Script
from tests.ports import free_port

ENDS_S = 60.0
"""By then a call with a deadline has ended, on any machine; one without would wait for ever."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, in a thread."""
    ends_s = time.monotonic() + ENDS_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_a_repeat_carries_the_same_request_id_and_starts_nothing_twice():
    with FakeServer() as server, Client.connect(server.address) as client:
        server.lose_next_answer()
        created = client.create_rollout(prompt="x")
        assert len(server.created) == 2
        assert len({request.request_id for request in server.created}) == 1
        assert [rollout.group_id for rollout in client.list_rollouts()] == [created.group_id]
        assert client.create_rollout(prompt="x").group_id != created.group_id, "another call is another request"


def test_unavailable_is_tried_again_within_the_deadline_and_nothing_else_is():
    with FakeServer() as server, Client.connect(server.address, timeout_s=ENDS_S) as client:
        server.unavailable(3)
        assert client.get_run().state == "running"
        with pytest.raises(InvalidRequest):
            client.create_rollout(prompt="x", sample_count=0)
        assert len(server.created) == 1
        server.unavailable(1000)
        begun_s = time.monotonic()
        with pytest.raises(Draining, match="stopping"):
            client.get_run(timeout_s=1.5)
        assert time.monotonic() - begun_s < ENDS_S


def test_a_cut_watch_goes_on_without_gap_or_repeat(proxied: Any):
    with FakeServer() as server, Client.connect(server.address) as client:
        proxy = proxied(server.address)
        seen: list[Any] = []
        with Client.connect(proxy.address) as watcher:
            thread = threading.Thread(target=lambda: seen.extend(watcher.watch_rollouts(timeout_s=100.0)))
            thread.start()
            groups: list[str] = []
            for _ in range(4):
                before = len(seen)
                groups += [client.create_rollout(prompt="x").group_id for _ in range(5)]
                client.wait_rollout(groups[-1], timeout_s=ENDS_S)
                until(lambda: len(seen) > before)  # noqa: B023 it watches through the proxy again
                proxy.cut()
            server.end_run()
            thread.join(ENDS_S)
        assert not thread.is_alive()
        assert proxy.connection_count >= 2
        sequences = [rollout.sequence for rollout in seen]
        assert sequences == sorted(set(sequences))
        assert {rollout.group_id for rollout in seen if rollout.ended} == set(groups)


async def test_a_cut_asyncio_watch_goes_on_as_well(proxied: Any):
    with FakeServer() as server:
        server.script(Script(run_s=math.inf))
        proxy = proxied(server.address)
        async with AsyncClient.connect(proxy.address) as client, AsyncClient.connect(server.address) as direct:
            created = await direct.create_rollout(prompt="x")
            watch = asyncio.ensure_future(client.wait_rollout(created.group_id, timeout_s=60.0))
            await asyncio.to_thread(until, lambda: proxy.connection_count == 1)
            proxy.cut()
            await asyncio.to_thread(until, lambda: proxy.connection_count == 2)
            await direct.cancel_rollout(created.group_id)
            assert (await watch).state == "cancelled"


def test_a_wrong_token_is_refused_at_once():
    with FakeServer(token="right") as server:
        for token, message in (("wrong", "token is wrong"), (None, "token is required")):
            with Client.connect(server.address, token=token) as client:
                with pytest.raises(Unauthenticated, match=message):
                    client.create_rollout(prompt="x")
                with pytest.raises(Unauthenticated, match=message):
                    next(client.watch_rollouts())
        assert server.created == []


def test_an_address_where_nobody_listens_fails_with_one_sentence_in_time():
    port = free_port()
    begun_s = time.monotonic()
    with Client.connect(f"127.0.0.1:{port}", timeout_s=1.5) as client, pytest.raises(Unreachable) as caught:
        client.get_run()
    assert time.monotonic() - begun_s < ENDS_S
    assert str(caught.value).startswith(f"127.0.0.1:{port} cannot be reached: Connection refused (")
    assert "\n" not in str(caught.value)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_server_that_never_answers_fails_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun_s = time.monotonic()
        with Client.connect(address) as client, pytest.raises((DeadlineExceeded, Unreachable), match=address):
            client.get_run(timeout_s=1.0)
        assert time.monotonic() - begun_s < ENDS_S


def test_a_running_group_of_the_fake_ends_when_it_is_cancelled():
    with FakeServer() as server, Client.connect(server.address) as client:
        server.script(Script(run_s=math.inf))
        created = client.create_rollout(prompt="x")
        seen = []
        for rollout in client.watch_rollouts(group_id=created.group_id, timeout_s=ENDS_S):
            seen.append((rollout.state, rollout.reason))
            if rollout.state == "running":
                client.cancel_rollout(created.group_id)
        assert seen[-1] == ("cancelled", "CLIENT")
