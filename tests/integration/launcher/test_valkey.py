"""Valkey on its private socket: it answers, and comes back after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from slipstream.launcher.rundir import create_run_dir
from slipstream.launcher.supervisor import Supervisor
from slipstream.launcher.valkey import socket_path, valkey_spec


async def test_valkey_is_private_and_comes_back_after_a_kill(tmp_path: Path):
    run = create_run_dir(tmp_path, "demo")
    socket = tmp_path / "v.sock"
    supervisor = Supervisor(backoff_s=0.05, stop_timeout_s=4.0)
    client = redis.asyncio.Redis.from_url(f"unix://{socket}")
    try:
        await supervisor.start([valkey_spec(run, socket)])
        assert socket.stat().st_mode & 0o077 == 0
        await client.set("key", "value")
        first = supervisor.pids["valkey"]
        watch = asyncio.ensure_future(supervisor.watch())
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(90):
            while True:
                try:
                    if await client.get("key") is None:  # nothing is kept on disk
                        break
                except (RedisConnectionError, RedisTimeoutError):
                    pass
                await asyncio.sleep(0.05)
        assert supervisor.pids["valkey"] != first
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    finally:
        await client.aclose()
        await supervisor.stop()


def test_a_run_directory_too_deep_for_a_socket_gets_one_elsewhere(tmp_path: Path):
    run = create_run_dir(tmp_path / ("deep" * 20), "demo")
    with socket_path(run) as socket:
        assert len(os.fsencode(socket)) <= 100
        assert socket.parent.exists()
    assert not socket.parent.exists()
