"""Loopback ports of a run: picked once, kept in `endpoints.toml`, reused on restart.

Ports come from below the kernel's ephemeral range, so that an outgoing connection can never sit on one.
Between picking a port and the service's own bind there are seconds; a lock file for each port, held for
the life of the launcher, keeps a second run of the same user from picking it meanwhile.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from slipstream.common.locks import FileLock
from slipstream.launcher.errors import NoPortError

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15000
EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel hands to outgoing connections."""
    try:
        first, last = EPHEMERAL_RANGE_FILE.read_text().split()
    except FileNotFoundError:
        return 32768, 60999
    return int(first), int(last)


def candidate_ports() -> list[int]:
    """Ports worth trying, in random order."""
    first, last = ephemeral_range()
    ports = [port for port in range(FIRST_PORT, 65536) if not first <= port <= last]
    random.SystemRandom().shuffle(ports)
    return ports


class PortLease:
    """Ports held by this process until `close`; also released when the process dies.

    `owner`: what a person is told has them, such as the run's directory.
    """

    def __init__(self, lock_dir: Path | None = None, owner: str = "") -> None:
        self._owner = owner
        self._lock_dir = lock_dir or Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}" / "ports"
        self._lock_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._locks: dict[int, FileLock] = {}

    def try_take(self, port: int) -> bool:
        """Lock the port if nobody listens on it and no other launcher holds it."""
        if port in self._locks:
            return False
        try:
            lock = FileLock(self._lock_dir / str(port))
        except BlockingIOError:
            return False
        if not bindable(port):
            lock.release()
            return False
        lock.say(self._owner)
        self._locks[port] = lock
        return True

    @property
    def held(self) -> set[int]:
        return set(self._locks)

    def owner_of(self, port: int) -> str:
        """Who said last that it has the port; nobody where that is not known."""
        try:
            return (self._lock_dir / str(port)).read_text(errors="replace")
        except OSError:
            return ""

    def take_any(self, candidates: Iterator[int]) -> int:
        for port in candidates:
            if self.try_take(port):
                return port
        raise NoPortError("no free loopback port is left")

    def close(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()


def bindable(port: int) -> bool:
    """Whether a listener could bind the port now. Old connections in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def assign_endpoints(
    path: Path, replicas: Iterable[str], lease: PortLease, *, metrics: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """Give every replica an address `host:port`, keeping those that `path` has and that are still free, or held here.

    Returns the addresses of the services and, with `metrics`, those of their metrics.
    """
    replicas, candidates, held = list(replicas), iter(candidate_ports()), lease.held

    def assign(known: dict[str, str]) -> dict[str, str]:
        return {replica: _assign(known.get(replica), lease, candidates, held) for replica in replicas}

    endpoints = assign(read_endpoints(path) if path.exists() else {})
    metrics_endpoints = assign(read_endpoints(path, "metrics") if path.exists() else {}) if metrics else {}
    write_endpoints(path, endpoints, metrics_endpoints, read_endpoints(path, "agents") if path.exists() else {})
    return endpoints, metrics_endpoints


def take_ports(names: Iterable[str], lease: PortLease, kept: Mapping[str, str] | None = None) -> dict[str, str]:
    """An address each, for what is known to the processes of this launch alone, but for those of `kept`."""
    candidates, held = iter(candidate_ports()), lease.held
    return {name: _assign((kept or {}).get(name), lease, candidates, held) for name in names}


def _assign(kept: str | None, lease: PortLease, candidates: Iterator[int], held: set[int]) -> str:
    """`held`: ports that were taken before for whoever has them; each is given out once."""
    if kept is not None and (port_of(kept) in held or lease.try_take(port_of(kept))):
        held.discard(port_of(kept))
        return kept
    return f"{LOOPBACK}:{lease.take_any(candidates)}"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def read_endpoints(path: Path, table: str = "endpoints") -> dict[str, str]:
    """Addresses by replica; `table` is "endpoints", or "metrics" or "agents", which may be absent."""
    tables = {"metrics": {}, "agents": {}, **tomllib.loads(path.read_text())}
    return {name: str(address) for name, address in tables[table].items()}


def write_endpoints(
    path: Path,
    endpoints: Mapping[str, str],
    metrics: Mapping[str, str] | None = None,
    agents: Mapping[str, str] | None = None,
) -> None:
    lines = ["# Address of every service of this run; kept over restarts.", "[endpoints]"]
    lines += [f'{replica} = "{address}"' for replica, address in endpoints.items()]
    if metrics:
        lines += ["", "# Where each serves Prometheus metrics, as http://ADDRESS/metrics.", "[metrics]"]
        lines += [f'{replica} = "{address}"' for replica, address in metrics.items()]
    if agents:
        lines += ["", "# Where outside agents reach the gateway, by HTTP; kept over restarts.", "[agents]"]
        lines += [f'{replica} = "{address}"' for replica, address in agents.items()]
    staged = path.with_suffix(".tmp")
    staged.write_text("\n".join(lines) + "\n")
    staged.replace(path)
