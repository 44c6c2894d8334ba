"""A service as a process of its own: signals, exit codes, log lines."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.common.config import ConfigError
from slipstream.common.runtime import ServiceFailed, _never_return, serve

DEADLINE_S = 90.0
SERVICES = Path(__file__).resolve().parents[3] / "services"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SERVICES)}

PROGRAM = """
import asyncio, sys
from slipstream.api.routing.v1.routing_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server
from slipstream.common.config import ServiceConfig, cli
from slipstream.common.runtime import serve
from slipstream.common.telemetry import setup_logging

async def forever():
    await asyncio.Event().wait()

async def returns():
    await asyncio.sleep(0.05)

async def raises():
    raise ValueError("broken")

async def main(loop):
    config = cli(ServiceConfig, sys.argv[2:])
    setup_logging(config, "router")
    name = "slipstream.api.routing.v1.RouterService"
    servicers = [(add_RouterServiceServicer_to_server, RouterServiceServicer(), name)]
    await serve(config, servicers, {"watch": loop, "other": forever})

asyncio.run(main(globals()[sys.argv[1]]))
"""


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(loop):
        command = [sys.executable, "-c", PROGRAM, loop, f"--log.file={tmp_path / 'log'}", "--replica=router-1"]
        processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def events(tmp_path):
    log = tmp_path / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(tmp_path, event):
    deadline = time.monotonic() + DEADLINE_S
    while not any(line["event"] == event for line in events(tmp_path)):
        assert time.monotonic() < deadline, f"no {event} in the log"
        time.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_the_process_with_0(start, tmp_path, signum):
    process = start("forever")
    wait_for(tmp_path, "service_started")
    process.send_signal(signum)
    assert process.wait(timeout=DEADLINE_S) == 0
    assert [line["event"] for line in events(tmp_path)] == ["service_started", "drain_started", "drain_ended"]


@pytest.mark.parametrize(("loop", "event"), [("returns", "loop_returned"), ("raises", "loop_failed")])
def test_a_loop_that_ends_takes_the_process_down(start, tmp_path, loop, event):
    assert start(loop).wait(timeout=DEADLINE_S) == 1
    line = next(line for line in events(tmp_path) if line["event"] == event)
    assert (line["loop"], line["level"]) == ("watch", "error")


def test_a_process_says_what_failed_inside_a_task_group():
    async def loop() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_raise(ValueError("the cause")))

    async def _raise(error: Exception) -> None:
        raise error

    with pytest.raises(ServiceFailed, match=r"^loop 'watch' failed: the cause$"):
        asyncio.run(_never_return("watch", loop))


def test_a_loop_that_refuses_its_configuration_says_so_to_whoever_started_the_process():
    async def loop() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_raise(ConfigError("model/config.json is damaged")))

    async def _raise(error: Exception) -> None:
        raise error

    with pytest.raises(ConfigError, match=r"^model/config.json is damaged$"):
        asyncio.run(_never_return("watch", loop))


def test_of_two_loops_that_end_together_the_refusal_is_told(make_config):
    async def fails() -> None:
        raise ValueError("broken")

    async def refuses() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(serve(make_config(), [], {"watch": fails, "other": refuses}))


def test_log_lines_carry_run_service_and_replica(start, tmp_path):
    start("forever")
    wait_for(tmp_path, "service_started")
    line = events(tmp_path)[0]
    assert (line["run_id"], line["service"], line["replica"]) == ("local", "router", "router-1")
    assert line["port"] > 0


def test_a_child_that_asked_for_it_dies_with_its_parent(tmp_path):
    child = f"""
import pathlib, time
from slipstream.common.runtime import die_with_parent
die_with_parent()
pathlib.Path({str(tmp_path / "ready")!r}).touch()
time.sleep(60)
"""
    parent = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", parent]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    child_pid = int(process.stdout.readline())
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stdout.close()
    while _runs(child_pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


BY_HAND = """
import asyncio
from slipstream.common.config import ServiceConfig
from slipstream.common.runtime import run_service

async def nothing(config):
    pass

run_service("router", ServiceConfig, nothing)
"""


def test_a_service_on_a_terminal_says_where_its_log_is(tmp_path):
    terminal, its = pty.openpty()
    command = [sys.executable, "-c", BY_HAND, f"--log.file={tmp_path / 'log'}"]
    with subprocess.Popen(command, stderr=its, env=ENVIRONMENT):
        os.close(its)
        assert os.read(terminal, 4096).decode().startswith(f"log: {tmp_path / 'log'};")
    os.close(terminal)


def test_a_service_of_a_launcher_says_nothing_of_it(tmp_path):
    command = [sys.executable, "-c", BY_HAND, f"--log.file={tmp_path / 'log'}"]
    assert subprocess.run(command, stderr=subprocess.PIPE, env=ENVIRONMENT, check=True, timeout=60).stderr == b""
