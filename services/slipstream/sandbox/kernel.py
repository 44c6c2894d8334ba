"""System calls that Python's standard library lacks, each for the calling thread alone.

Credentials, mount namespace and cgroup (version 1) belong to a thread in Linux; only the C library's wrappers
make them the process's. So a place can be a thread that is somebody else than the rest of the executor.
"""

from __future__ import annotations

import ctypes
import os
import platform

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_CLONE_NEWNS = 0x20000
# Numbers of setgroups, setresgid, setresuid.
_CREDENTIAL_CALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_mounts() -> None:
    """Give the calling thread a mount namespace of its own, from which nothing propagates back."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = [_bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(options)]
    _check(_libc.mount(*arguments), f"mount on {target}")


def bind(source: str, target: str, flags: int) -> None:
    """Bind `source`, without what is mounted below it, on `target`; the flags need a second call."""
    mount(source, target, None, MS_BIND)
    mount(None, target, None, MS_BIND | MS_REMOUNT | flags)


def become(uid: int) -> None:
    """Make the calling thread, for good, a user and group `uid` without capabilities. Raises `OSError`."""
    calls = _CREDENTIAL_CALLS.get(platform.machine())
    if calls is None:
        raise OSError(f"the user id of one thread cannot be set on {platform.machine()}")
    setgroups, setresgid, setresuid = calls
    _check(_libc.syscall(setgroups, 0, None), "setgroups")
    _check(_libc.syscall(setresgid, uid, uid, uid), "setresgid")
    _check(_libc.syscall(setresuid, uid, uid, uid), "setresuid")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
